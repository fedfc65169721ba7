"""One GenerateSession call: the reader's commands on one side, an open delivery on the other. Knows no gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from headrace import errors
from headrace.v1 import gateway_pb2
from services.gateway import validation
from services.gateway.peers import Delivery


class Reader:
    """Keeps a session's credits.

    Args:
        credit_count: that each answer starts with.
        answer_count: answers of the generation.
        patience_s: seconds without credits, all of them used up, after which the session ends.
    """

    def __init__(self, credit_count: int, answer_count: int, patience_s: float) -> None:
        self._window = credit_count
        self._left = dict.fromkeys(range(answer_count), credit_count)
        self._patience_s = patience_s
        self._moved_at = time.monotonic()
        self._delivery: Delivery | None = None
        self._cancelled = False

    async def opened(self, delivery: Delivery) -> None:
        """A delivery is open, with the first window, and nothing taken of it: it is told what came since."""
        self._delivery = delivery
        since = {index: left - self._window for index, left in self._left.items() if left > self._window}
        for index, credit_count in since.items():
            await delivery.grant(credit_count, index)
        if self._cancelled:
            await delivery.cancel()

    def took(self, delta: gateway_pb2.Delta) -> None:
        """A delta was handed to the reader."""
        self._left[delta.index] = self._left.get(delta.index, 0) - delta.token_count
        self._moved_at = time.monotonic()

    async def obey(self, requests: AsyncIterator[gateway_pb2.GenerateSessionRequest]) -> None:
        """Passes credits and cancel on. Raises InvalidArgument for what cannot be obeyed."""
        async for request in requests:
            command = request.WhichOneof("command")
            if command == "credits":
                validation.check_credits(request.credits.credit_count, "credits.credit_count")
                if request.credits.index not in self._left:
                    raise errors.InvalidArgument(
                        f"credits.index is {request.credits.index}; expected 0 to {len(self._left) - 1}",
                        field="credits.index",
                    )
                self._left[request.credits.index] += request.credits.credit_count
                self._moved_at = time.monotonic()
                if self._delivery is not None:
                    await self._delivery.grant(request.credits.credit_count, request.credits.index)
            elif command == "cancel":
                self._cancelled = True
                if self._delivery is not None:
                    await self._delivery.cancel()
            else:
                raise errors.InvalidArgument(
                    f"command is {command or 'nothing'}; expected credits or cancel after the first", field="command"
                )

    async def watch(self) -> None:
        """Raises ResourceExhausted once the reader has let its credits run out for too long."""
        while True:
            idle_s = time.monotonic() - self._moved_at
            if idle_s >= self._patience_s and all(left <= 0 for left in self._left.values()):
                raise errors.ResourceExhausted(
                    f"no credits came for {self._patience_s:g} s", reason=errors.Reason.SLOW_CONSUMER
                )
            await asyncio.sleep(max(0.05, self._patience_s - idle_s) if idle_s < self._patience_s else 0.5)
