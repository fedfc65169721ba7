"""The engine process with an engine that computes nothing: for measuring what the hops around it cost.

`python -m headrace.bench.null_engine` stands in for `python -m services.engine`: its edge, its thread and its settings
are the real ones. Every open generation gets one made-up token a step; HEADRACE_BENCH_TOKENS_PER_S says how many there
are a second, over all generations. Imports the services when it is used; the published package does not have them.
"""

from __future__ import annotations

import os
import time
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from headrace.bench.workloads import FIRST_ID, VOCABULARY_SIZE

if TYPE_CHECKING:
    from services.engine.outputs import EngineStats, RequestOutput, StepOutput
    from services.engine.request import Request

TOKENS_PER_S_VARIABLE = "HEADRACE_BENCH_TOKENS_PER_S"
DEFAULT_TOKENS_PER_S = 1000.0
CONTEXT_LENGTH = 1 << 20
_STRIDE = 7919  # a prime: ids run through the vocabulary without a pattern that text would show


class NullEngine:
    """What `EngineLoop` and the engine's edge need of an engine. One thread calls everything.

    Args:
        tokens_per_s: over all generations together.
    """

    dtype = "none"

    def __init__(self, tokens_per_s: float) -> None:
        from services.engine.config import EngineConfig
        from services.engine.limits import EngineLimits
        from services.engine.memory import MemoryLedger

        self.config = EngineConfig(model_dir=Path())
        self.limits = EngineLimits(CONTEXT_LENGTH, CONTEXT_LENGTH, VOCABULARY_SIZE, frozenset())
        nothing: dict[str, Any] = {f.name: "" if f.name == "kv_formula" else 0 for f in fields(MemoryLedger)}
        self.memory = MemoryLedger(**nothing)
        self.model = SimpleNamespace(family=SimpleNamespace(architecture="NullEngine"))
        self._tokens_per_s = tokens_per_s
        self._open: dict[int, Request] = {}
        self._ended: list[RequestOutput] = []
        self._next_step_s = 0.0

    @property
    def has_work(self) -> bool:
        """True while any request has not ended, or an ending is not published."""
        return bool(self._open or self._ended)

    @property
    def runnable(self) -> bool:
        """True when a step would do something now."""
        return bool(self._ended) or any(not request.paused for request in self._open.values())

    next_deadline_ns = None

    def add(self, request: Request) -> None:
        """Takes a request. Raises RequestRefused."""
        from services.engine.limits import fit_request

        fit_request(request, self.limits)
        self._open[request.request_id] = request

    def grant(self, request_id: int, token_count: int) -> None:
        """Lets it have more tokens."""
        if request_id in self._open:
            self._open[request_id].credit_limit += token_count

    def abort(self, request_id: int) -> bool:
        """Ends it as cancelled."""
        from services.engine.outputs import RequestOutput, RequestUsage
        from services.engine.request import FinishReason

        request = self._open.pop(request_id, None)
        if request is not None:
            usage = RequestUsage.of(request)
            self._ended.append(RequestOutput(request_id, finish=FinishReason.CANCELLED, usage=usage))
        return request is not None

    def abort_all(self) -> None:
        """Ends every request as cancelled."""
        for request_id in list(self._open):
            self.abort(request_id)

    def step(self) -> StepOutput:
        """Waits until it is time, then gives each request that has credits a token."""
        from services.engine.outputs import StepOutput

        outputs, self._ended = self._ended, []
        ready = [request for request in self._open.values() if not request.paused]
        if ready:
            self._wait(len(ready) / self._tokens_per_s)
            now = time.monotonic_ns()
            outputs += [self._generate(request, now) for request in ready]
        return StepOutput(outputs)

    def _wait(self, step_s: float) -> None:
        now = time.monotonic()
        self._next_step_s = max(self._next_step_s + step_s, now)
        time.sleep(self._next_step_s - now)

    def _generate(self, request: Request, now: int) -> RequestOutput:
        from services.engine.outputs import RequestOutput, RequestUsage
        from services.engine.request import FinishReason

        token = FIRST_ID + (request.request_id + request.output_count) * _STRIDE % (VOCABULARY_SIZE - FIRST_ID)
        request.tokens.append(token)
        first = request.output_count == 1
        if first:
            request.clock.first_scheduled_ns = request.clock.first_token_ns = now
        request.clock.last_token_ns = now
        finish = FinishReason.LENGTH if request.output_count >= (request.max_tokens or 0) else None
        if finish is not None:
            del self._open[request.request_id]
        usage = RequestUsage.of(request) if first or finish else None
        return RequestOutput(request.request_id, (token,), finish=finish, usage=usage)

    def stats(self) -> EngineStats:
        """Nothing of what a real engine counts."""
        from services.engine.outputs import EngineStats

        return EngineStats(**{f.name: 0 for f in fields(EngineStats)})

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
