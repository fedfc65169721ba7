"""Who is next where several share something: whoever was given least of it, by weight. Knows no requests and no queue.

Start-time fair queueing. Each key has a clock that moves on by what the key is given, divided by its weight, and the
key whose clock is furthest back is next. The clock of whoever was next last is the time for all: who comes back after a
while goes on from there, so nobody saves up by being away. Gateway and engine order their queues by this one rule.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
KEYS_TO_TIDY = 10_000


class FairClock(Generic[Key]):
    """Clocks by key, in tokens a weight of 1."""

    def __init__(self) -> None:
        self._now = 0.0
        self._clocks: dict[Key, float] = {}
        self._tidy_at = KEYS_TO_TIDY

    def at(self, key: Key) -> float:
        """A key's clock; whose is lowest is next."""
        return max(self._now, self._clocks.get(key, 0.0))

    def turn(self, key: Key) -> None:
        """It is a key's turn."""
        self._now = self.at(key)

    def give(self, key: Key, tokens: float, weight: float) -> None:
        """A key was given tokens; fewer than 0: it gives some back."""
        self._clocks[key] = self.at(key) + tokens / weight
        if len(self._clocks) > self._tidy_at:  # clocks that are behind say nothing
            self._clocks = {other: at for other, at in self._clocks.items() if at > self._now}
            self._tidy_at = KEYS_TO_TIDY + 2 * len(self._clocks)
