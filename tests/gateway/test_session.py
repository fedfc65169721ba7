"""What a session's reader said reaches whichever delivery serves it, each grant exactly once."""

from __future__ import annotations

import asyncio

import pytest

from headrace import errors
from headrace.v1.gateway_pb2 import GenerateSessionRequest
from services.gateway.session import Reader


class Delivery:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.granted = {0: 0, 1: 0}
        self.cancelled = 0

    async def grant(self, credit_count: int, index: int) -> None:
        await asyncio.sleep(0)
        self.granted[index] += credit_count

    async def cancel(self) -> None:
        self.cancelled += 1


class Commands:
    """A reader's commands, one after the other, as they are put."""

    def __init__(self, reader: Reader) -> None:
        self._queue: asyncio.Queue[GenerateSessionRequest] = asyncio.Queue()
        self._task = asyncio.create_task(reader.obey(self))

    def __aiter__(self):
        return self

    async def __anext__(self) -> GenerateSessionRequest:
        return await self._queue.get()

    async def send(self, **command) -> None:
        self._queue.put_nowait(GenerateSessionRequest(**command))
        for _ in range(10):
            await asyncio.sleep(0)

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def credits_of(count: int, index: int = 0) -> dict:
    return {"credits": {"credit_count": count, "index": index}}


async def test_grants_before_and_after_opening_come_once():
    """Before the delivery is open, while it is, and on the one that takes its place before the first token."""
    reader, first, second = Reader(4, 2, 60), Delivery(), Delivery()
    commands = Commands(reader)
    await commands.send(**credits_of(3))
    await reader.opened(first)
    assert first.granted == {0: 3, 1: 0}
    await commands.send(**credits_of(5, 1))
    assert first.granted == {0: 3, 1: 5}
    opening = asyncio.create_task(reader.opened(second))
    await commands.send(**credits_of(2))  # while it is told what came since
    await opening
    assert second.granted == {0: 5, 1: 5}
    assert first.granted == {0: 3, 1: 5}
    await commands.end()


async def test_a_cancel_reaches_a_delivery_that_opens_later():
    """A reader that has given up does not start a generation again on another engine."""
    reader, delivery = Reader(4, 1, 60), Delivery()
    commands = Commands(reader)
    await commands.send(cancel={})
    await reader.opened(delivery)
    assert delivery.cancelled == 1
    await commands.end()


async def test_a_second_open_is_refused():
    """By name."""
    reader = Reader(4, 1, 60)
    commands = Commands(reader)
    await commands.send(open={})
    with pytest.raises(errors.InvalidArgument, match="command is open"):
        await commands._task
