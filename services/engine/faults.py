"""Keeps a fault in one sequence of a step from ending the others. Knows steps; not what computes them.

When a whole step fails, its sequences are computed again, one by one and without guesses: that writes the same keys
and values to the same slots. Those that fail by themselves end, the others have lost some time. When steps keep
failing whole, the fault is not the requests': the exception goes on, and the process ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.engine.ahead import Flight
from services.engine.plan import Sampled
from services.engine.request import Request, RequestStatus
from services.engine.step import ScheduledStep, StepResult, single_step

PATIENCE = 3
"""Steps in a row of which nothing could be computed before the fault counts as the engine's own."""


class EngineFault(RuntimeError):
    """Nothing can be computed any more, whatever the request: the engine ends at once."""


class Runner(Protocol):
    """Whatever computes steps."""

    def launch(self, step: ScheduledStep) -> Callable[[], StepResult]:
        """Begin to compute a step; the function returned waits for what it gives."""


class FaultGuard:
    """A runner around a runner."""

    def __init__(self, runner: Runner, block_size: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._lost_count = 0  # steps in a row
        self._last: ScheduledStep | None = None  # that was launched

    def launch(self, step: ScheduledStep, now: int) -> Flight:
        """Begin to compute a step. One that cannot be launched is computed one by one when it is waited for.

        Waiting raises what the runner raised: an EngineFault, or anything when nothing could be computed for the third
        time in a row, or when the next step is already computed from what this one should have given.

        Raises:
            EngineFault: raised by the runner.
        """
        self._last = step
        try:
            wait = self._runner.launch(step)
        except EngineFault:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, it may concern one request alone
            first = error
            return Flight(step, lambda: self._one_by_one(step, first), now, failed=True)
        return Flight(step, lambda: self._waited(step, wait), now)

    def _waited(self, step: ScheduledStep, wait: Callable[[], StepResult]) -> StepResult:
        try:
            result = wait()
        except EngineFault:
            raise
        except Exception as error:
            if self._last is not step:
                raise
            return self._one_by_one(step, error)
        if len(result.failed) < len(step.requests):
            self._lost_count = 0
        return result

    def _one_by_one(self, step: ScheduledStep, first: Exception) -> StepResult:
        """Compute the sequences again whose requests still run; every token before them is known by now."""
        whole = StepResult([])
        alone = len(step.requests) == 1 and not step.draft_token_count
        for place, (request, draft) in enumerate(zip(step.requests, step.drafts, strict=True)):
            if request.status is not RequestStatus.RUNNING:
                result = _same(step, request, None)
            elif alone:
                result = _failure(step, request, first)
            else:
                result = self._again(step, place)
            whole.sampled.extend([*result.sampled, *[None] * draft.size])
            whole.explained.extend(result.explained)
            whole.failed.update(result.failed)
        if len(whole.failed) == len(step.requests):
            self._lost_count += 1
            if self._lost_count >= PATIENCE:
                raise first
        else:
            self._lost_count = 0
        return whole

    def _again(self, step: ScheduledStep, place: int) -> StepResult:
        try:
            return self._runner.launch(single_step(step, place, self._block_size))()
        except EngineFault:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            return _failure(step, step.requests[place], error)


def _failure(step: ScheduledStep, request: Request, error: Exception) -> StepResult:
    text = f"computing failed: {type(error).__name__}: {str(error)[:200]}"
    result = _same(step, request, Sampled(-1, error=text))
    result.failed[request.request_id] = text
    return result


def _same(step: ScheduledStep, request: Request, sampled: Sampled | None) -> StepResult:
    """The same for each row of a request, but for those after guesses; none of its prompt is explained."""
    rows = [row for row in step.sampled if row.request is request and not row.guesses.size]
    return StepResult([sampled for _ in rows], [[] for explained, _ in step.explained if explained is request])
