"""The next steps as a Chrome trace, from what each step tells anyway. Knows the format; no wire, no tensors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from services.engine.outputs import StepFacts

MAX_STEPS = 10_000
_STEPS_ROW = 0


class Profile:
    """Records steps until there are enough; `done` is then the document.

    Args:
        step_count: steps to record, 1 to `MAX_STEPS`.
        name_of: what to call a request, by the engine's number for it.
    """

    def __init__(self, step_count: int, name_of: Callable[[int], str]) -> None:
        self._wanted, self._name_of = step_count, name_of
        self._steps: list[StepFacts] = []
        self._names: dict[int, str] = {}
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def add(self, facts: StepFacts) -> None:
        """A step has been taken."""
        if self.done.done():
            return
        self._steps.append(facts)
        for member in facts.members:
            if member.request_id not in self._names:
                self._names[member.request_id] = self._name_of(member.request_id) or str(member.request_id)
        if len(self._steps) >= self._wanted:
            self.done.set_result(json.dumps(self.document()).encode())

    def document(self) -> dict[str, Any]:
        """What was recorded: a row of steps, and one for each request with its part in them; microseconds."""
        origin_ns = self._steps[0].started_ns if self._steps else 0
        rows = {request_id: row for row, request_id in enumerate(self._names, _STEPS_ROW + 1)}
        events = [_named(_STEPS_ROW, "steps"), *(_named(rows[i], name) for i, name in self._names.items())]
        for number, step in enumerate(self._steps):
            start_us, duration_us = (step.started_ns - origin_ns) / 1000, step.step_ns / 1000
            counts = {"prefill tokens": step.prefill_token_count, "decode tokens": step.decode_token_count}
            events.append(_complete(_STEPS_ROW, f"step {number}", start_us, duration_us, counts))
            for member in step.members:
                name = "decode" if member.decoding else "prefill"
                tokens = {"tokens": member.token_count}
                events.append(_complete(rows[member.request_id], name, start_us, duration_us, tokens))
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": name}}


def _complete(row: int, name: str, start_us: float, duration_us: float, said: dict[str, int]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 1, "tid": row, "ts": start_us, "dur": duration_us, "args": said}
