"""One step ahead: which step is launched, and which is waited for. Knows steps; not how they are decided or computed.

The host needs time between steps: to decide, to tell, to hear. On a device that computes by itself that time is free
if the next step is launched before the last one is waited for. Over a step that is foreseeable the next can be planned:

    launch 1    launch 2    wait 1    launch 3    wait 2    ...

One that is not, because a choice in it needs the host or a guess may be wrong, is waited for first.
(vLLM and SGLang do likewise, under the names of asynchronous scheduling and overlap scheduling.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.engine.scheduler import Scheduler
from services.engine.step import ScheduledStep, StepResult


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that was launched."""

    step: ScheduledStep
    wait: Callable[[], StepResult]
    """Gives what it gave, when it has been computed. To be called once."""
    launched_ns: int
    failed: bool = False
    """It could not be launched; it is computed while it is waited for."""

    @property
    def foreseeable(self) -> bool:
        """The next step may be planned before it has been waited for."""
        return not self.failed and self.step.foreseeable


class Lookahead:
    """Launches steps, and says which of them is to be waited for: the one before, or without ``ahead`` the same."""

    def __init__(self, scheduler: Scheduler, launch: Callable[[ScheduledStep], Flight], *, ahead: bool) -> None:
        """Know who decides on steps, what begins to compute them, and whether there may be one in flight."""
        self._scheduler, self._launch, self._ahead = scheduler, launch, ahead
        self.in_flight: Flight | None = None

    def turn(self) -> Flight | None:
        """Launch what can be planned now; the step to wait for and commit before the next turn, if there is one."""
        before, self.in_flight = self.in_flight, None
        if before is not None and not before.foreseeable:
            return before
        step = self._scheduler.schedule(before.step if before is not None else None)
        launched = self._launch(step) if step is not None else None
        if before is None and launched is not None and not (self._ahead and launched.foreseeable):
            return launched
        self.in_flight = launched
        return before
