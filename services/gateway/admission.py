"""How many requests are inside at once. Knows nothing of what they ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.errors import ResourceExhausted

RETRY_AFTER_S = 1.0


class Admission:
    """A bound on open requests: what is over it is refused at once, so that what is inside keeps its speed.

    Queueing proper, by class, happens in the engine's scheduler.
    """

    def __init__(self, max_open_requests: int) -> None:
        self._max = self.limit = max_open_requests
        self.open_count = 0

    @contextmanager
    def admit(self) -> Iterator[int]:
        """Holds a place; yields how many requests were inside before.

        Raises:
            ResourceExhausted: all places are taken.
        """
        before = self.open_count
        if before >= self._max:
            raise ResourceExhausted(
                f"{before} requests are open, the most that are taken; retry later", retry_after_s=RETRY_AFTER_S
            )
        self.open_count += 1
        try:
            yield before
        finally:
            self.open_count -= 1
