"""Endings on their way to Redis: sent at once, and again until it has taken them. Knows no request.

Settling is idempotent, so that each counts once however often it is sent.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from services.gateway.quota import Charge, Usage
from services.gateway.redis_quota import RedisQuotas

RETRY_S = 1.0
MAX_UNSETTLED = 100_000
MAX_UNDER_WAY = 256

Ended = tuple[Charge, Usage | None]


class Settlements:
    """Keeps what Redis has not taken.

    Args:
        shared: takes it.
        answered: called with the seconds that each answer took.
        lost: called with what became of it where there was none.
    """

    def __init__(self, shared: RedisQuotas, answered: Callable[[float], None], lost: Callable[[str], None]) -> None:
        self._shared, self._answered, self._lost = shared, answered, lost
        self._waiting: deque[Ended] = deque()
        self._under_way: set[asyncio.Future[None]] = set()
        self._retry: asyncio.TimerHandle | None = None  # set: nothing is sent before

    def __len__(self) -> int:
        return len(self._waiting) + len(self._under_way)

    def add(self, charge: Charge, usage: Usage | None) -> None:
        """A lease has ended. With far too many to settle this one is left to expire."""
        if len(self) >= MAX_UNSETTLED:
            return
        self._waiting.append((charge, usage))
        if self._retry is None:
            self._send()

    async def drain(self, timeout_s: float) -> None:
        """Settles what is left, as far as Redis takes it in time; the end."""
        self._send()
        deadline = time.monotonic() + timeout_s
        while self._under_way and time.monotonic() < deadline:
            await asyncio.wait(self._under_way, timeout=deadline - time.monotonic())
        for asked in self._under_way:
            asked.cancel()
        if self._retry is not None:
            self._retry.cancel()

    def _send(self) -> None:
        self._retry = None
        while self._waiting and len(self._under_way) < MAX_UNDER_WAY:
            ended = self._waiting.popleft()
            asked = self._shared.settle(*ended)
            self._under_way.add(asked)
            asked.add_done_callback(partial(self._taken, ended, time.monotonic()))

    def _taken(self, ended: Ended, began: float, asked: asyncio.Future[None]) -> None:
        self._under_way.discard(asked)
        if asked.cancelled():
            return
        error = asked.exception()
        if error is not None:
            self._waiting.append(ended)
            self._lost(str(error))
            if self._retry is None:
                self._retry = asyncio.get_running_loop().call_later(RETRY_S, self._send)
            return
        self._answered(time.monotonic() - began)
        if self._waiting and self._retry is None:
            self._send()
