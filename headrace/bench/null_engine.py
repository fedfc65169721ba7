"""The engine process with an engine that computes nothing: for measuring what the hops around it cost.

`python -m headrace.bench.null_engine` stands in for `python -m services.engine`: its edge, its thread and its settings
are the real ones. Every open generation gets one made-up token a step; HEADRACE_BENCH_TOKENS_PER_S says how many there
are a second, over all generations. Imports the services when it is used; the published package does not have them.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from headrace.bench.workloads import FIRST_ID, VOCABULARY_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.engine.memory import ResidentMemory
    from services.engine.outputs import EngineStats, RequestOutput, RequestUsage, StepOutput
    from services.engine.request import Request

TOKENS_PER_S_VARIABLE = "HEADRACE_BENCH_TOKENS_PER_S"
DEFAULT_TOKENS_PER_S = 1000.0
CONTEXT_LENGTH = 1 << 20
_STRIDE = 7919  # a prime: ids run through the vocabulary without a pattern that text would show


@dataclass(slots=True)
class _Open:
    """A request under way; counted here, so that a token costs next to nothing."""

    request: Request
    allowed: int  # tokens, of all
    count: int = 0


class NullEngine:
    """What `EngineLoop` and the engine's edge need of an engine. One thread calls everything.

    Args:
        tokens_per_s: over all generations together.
    """

    dtype = kv_cache_dtype = "none"
    next_deadline_ns = None
    gpus = ()

    def __init__(self, tokens_per_s: float) -> None:
        from services.engine import limits, outputs, request
        from services.engine.config import EngineConfig
        from services.engine.memory import MemoryLedger, ResidentMemory

        self.config = EngineConfig(model_dir=Path())
        self.limits = limits.EngineLimits(CONTEXT_LENGTH, CONTEXT_LENGTH, VOCABULARY_SIZE, frozenset())
        nothing: dict[str, Any] = {f.name: "" if f.name == "kv_formula" else 0 for f in fields(MemoryLedger)}
        self.memory = MemoryLedger(**nothing)
        self._no_memory = ResidentMemory()
        self.model = SimpleNamespace(family=SimpleNamespace(architecture="NullEngine"))
        self._fit = limits.fit_request
        self._outputs, self._finish = outputs, request.FinishReason
        self._tokens_per_s = tokens_per_s
        self._open: dict[int, _Open] = {}
        self._ended: list[RequestOutput] = []
        self._next_step_s = 0.0

    @property
    def has_work(self) -> bool:
        """True while any request has not ended, or an ending is not published."""
        return bool(self._open or self._ended)

    @property
    def runnable(self) -> bool:
        """True when a step would do something now."""
        return bool(self._ended) or any(one.count < one.allowed for one in self._open.values())

    def add(self, request: Request) -> None:
        """Takes a request. Raises RequestRefused."""
        self._fit(request, self.limits)
        self._open[request.request_id] = _Open(request, request.credit_limit)

    def grant(self, request_id: int, token_count: int) -> None:
        """Lets it have more tokens."""
        if request_id in self._open:
            self._open[request_id].allowed += token_count

    def abort(self, request_id: int) -> bool:
        """Ends it as cancelled."""
        one = self._open.pop(request_id, None)
        if one is not None:
            ended = self._outputs.RequestOutput(request_id, finish=self._finish.CANCELLED, usage=self._usage(one))
            self._ended.append(ended)
        return one is not None

    def abort_all(self) -> None:
        """Ends every request as cancelled."""
        for request_id in list(self._open):
            self.abort(request_id)

    def resident(self) -> ResidentMemory:
        """Holds nothing that would be worth telling."""
        return self._no_memory

    def on_lost(self, function: Callable[[str], None]) -> None:
        """Has no other process that could be lost."""

    def close(self) -> None:
        """Holds nothing that would have to end."""

    def step(self) -> StepOutput:
        """Waits until it is time, then gives each request that has credits a token."""
        news, self._ended = self._ended, []
        ready = [one for one in self._open.values() if one.count < one.allowed]
        if ready:
            self._wait(len(ready) / self._tokens_per_s)
            now = time.monotonic_ns()
            news += [self._generate(one, now) for one in ready]
        return self._outputs.StepOutput(news)

    def _wait(self, step_s: float) -> None:
        now = time.monotonic()
        self._next_step_s = max(self._next_step_s + step_s, now)
        time.sleep(self._next_step_s - now)

    def _generate(self, one: _Open, now: int) -> RequestOutput:
        request_id = one.request.request_id
        token = FIRST_ID + (request_id + one.count) * _STRIDE % (VOCABULARY_SIZE - FIRST_ID)
        one.count += 1
        if one.count > 1 and one.count < (one.request.max_tokens or 0):
            return self._outputs.RequestOutput(request_id, (token,))
        if one.count == 1:
            one.request.clock.first_scheduled_ns = one.request.clock.first_token_ns = now
        one.request.clock.last_token_ns = now
        one.request.clock.decode_step_count = one.count
        finish = self._finish.LENGTH if one.count >= (one.request.max_tokens or 0) else None
        if finish is not None:
            del self._open[request_id]
        return self._outputs.RequestOutput(request_id, (token,), finish=finish, usage=self._usage(one))

    def _usage(self, one: _Open) -> RequestUsage:
        return replace(self._outputs.RequestUsage.of(one.request), output_token_count=one.count)

    def rest(self) -> None:
        """It does not measure its gaps."""

    def stats(self) -> EngineStats:
        """Nothing of what a real engine counts."""
        nothing: dict[str, Any] = {f.name: 0 for f in fields(self._outputs.EngineStats)}
        return self._outputs.EngineStats(**nothing)

    def flush_prefix_cache(self) -> int:
        """There is none."""
        return 0


def main() -> int:
    """Runs the engine process; returns its exit code."""
    from services.common import serve
    from services.engine.service import EngineProcess
    from services.engine.settings import EngineProcessSettings

    class NullEngineProcess(EngineProcess):
        def _load(self, directory: Path) -> Any:
            return NullEngine(float(os.environ.get(TOKENS_PER_S_VARIABLE, DEFAULT_TOKENS_PER_S)))

    return serve.main("engine", EngineProcessSettings, NullEngineProcess)


if __name__ == "__main__":
    raise SystemExit(main())
