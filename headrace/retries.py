"""When a failed call is worth another try, and after how long. Knows no channel.

Only what has brought nothing is repeated, and only where the server says that it can help: UNAVAILABLE, and
RESOURCE_EXHAUSTED with a retry time. The server's time is kept; without one it is a random part of a time that doubles.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from headrace import errors

FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 30.0  # a server that asks for more is told to the caller


class Retry:
    """The tries of one call.

    Args:
        count: further tries at most.
        timeout_s: for all of them together; None: no limit.
        now: monotonic seconds.
        draw: a number in [0, 1).
    """

    def __init__(
        self,
        count: int,
        timeout_s: float | None,
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._left, self._tried, self._now, self._draw = count, 0, now, draw
        self._ends_at = None if timeout_s is None else now() + timeout_s

    def timeout_s(self) -> float | None:
        """What the next try may take."""
        return None if self._ends_at is None else max(0.0, self._ends_at - self._now())

    def wait_s(self, error: errors.HeadraceError) -> float | None:
        """Seconds before the next try; None: there is none, and the error is the caller's."""
        hint = error.retry_after_s
        useful = isinstance(error, errors.Unavailable) or (isinstance(error, errors.ResourceExhausted) and hint)
        if not useful or self._left <= 0:
            return None
        wait_s = FIRST_WAIT_S * 2**self._tried * self._draw() if hint is None else hint * (1 + self._draw() / 10)
        if wait_s > LONGEST_WAIT_S or (self._ends_at is not None and self._now() + wait_s >= self._ends_at):
            return None
        self._left -= 1
        self._tried += 1
        return wait_s
