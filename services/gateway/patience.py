"""How long a reader may take nothing. Knows no connection.

One timer a call, not one a message: it looks now and then how long the write of the moment has been waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Self

from headrace.errors import Reason, ResourceExhausted

Write = Callable[[Any], Awaitable[None]]


class Patience:
    """Writes for a call, and ends it when one write waits too long. Use as `with`, in the task that writes.

    Args:
        write: hands a message to the connection, waiting while the reader's window is full.
        limit_s: seconds that a write may wait.
    """

    def __init__(self, write: Write, limit_s: float) -> None:
        self._write, self._limit_s = write, limit_s
        self._loop = asyncio.get_running_loop()
        self._began: float | None = None
        self._expired = False

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        self._timer = self._loop.call_later(self._limit_s, self._look)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    async def write(self, message: Any) -> None:
        """Writes a message. Raises ResourceExhausted (SLOW_CONSUMER) when the reader took nothing for too long."""
        self._began = self._loop.time()
        try:
            await self._write(message)
        except (asyncio.CancelledError, Exception) as error:
            if not self._expired:
                raise
            if isinstance(error, asyncio.CancelledError) and self._task is not None:
                self._task.uncancel()
            raise ResourceExhausted(
                f"the reader took nothing for {self._limit_s:g} s", reason=Reason.SLOW_CONSUMER
            ) from None
        finally:
            self._began = None

    def _look(self) -> None:
        waited_s = self._loop.time() - self._began if self._began is not None else 0.0
        if waited_s < self._limit_s:
            self._timer = self._loop.call_later(max(self._limit_s - waited_s, 0.01), self._look)
        elif self._task is not None:
            self._expired = True
            self._task.cancel()
