"""Keeps a fault in one sequence of a step from ending the others. Knows steps; not what computes them.

When a whole step fails, its sequences are computed again, one by one and without guesses: that writes the same keys
and values to the same slots. Those that fail by themselves end, the others have lost some time. When steps keep
failing whole, the fault is not the requests': the exception goes on, and the process ends.
"""

from __future__ import annotations

from typing import Protocol

from services.engine.plan import Sampled
from services.engine.step import ScheduledStep, StepResult, single_steps

PATIENCE = 3
"""Steps in a row of which nothing could be computed before the fault counts as the engine's own."""


class EngineFault(RuntimeError):
    """Nothing can be computed any more, whatever the request: the engine ends at once."""


class Runner(Protocol):
    """Whatever computes steps."""

    def step(self, step: ScheduledStep) -> StepResult:
        """Compute a step."""


class FaultGuard:
    """A runner around a runner."""

    def __init__(self, runner: Runner, block_size: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._lost_count = 0  # steps in a row

    def step(self, step: ScheduledStep) -> StepResult:
        """Compute a step.

        Raises:
            EngineFault: raised by the runner.
            Exception: whatever the runner raised, when nothing could be computed for the third time in a row.
        """
        try:
            result = self._runner.step(step)
        except EngineFault:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it was, it may concern one request alone
            result = self._one_by_one(step, error)
        if len(result.failed) < len(step.requests):
            self._lost_count = 0
        return result

    def _one_by_one(self, step: ScheduledStep, first: Exception) -> StepResult:
        whole = StepResult([])
        if len(step.requests) == 1 and not step.draft_token_count:
            _add(whole, _failure(step, first))
        else:
            for single, draft in zip(single_steps(step, self._block_size), step.drafts, strict=True):
                try:
                    result = self._runner.step(single)
                except EngineFault:
                    raise
                except Exception as error:  # noqa: BLE001 - as above
                    result = _failure(single, error)
                _add(whole, result)
                whole.sampled.extend([None] * draft.size)
        if len(whole.failed) == len(step.requests):
            self._lost_count += 1
            if self._lost_count >= PATIENCE:
                raise first
        return whole


def _failure(single: ScheduledStep, error: Exception) -> StepResult:
    text = f"computing failed: {type(error).__name__}: {str(error)[:200]}"
    return StepResult(
        sampled=[Sampled(-1, error=text) for _ in single.sampled],
        explained=[[] for _ in single.explained],
        failed={single.requests[0].request_id: text},
    )


def _add(whole: StepResult, result: StepResult) -> None:
    whole.sampled.extend(result.sampled)
    whole.explained.extend(result.explained)
    whole.failed.update(result.failed)
