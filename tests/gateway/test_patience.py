"""A reader that takes nothing is ended after the limit; a slow one, or none to write to, is not."""

from __future__ import annotations

import asyncio

import pytest

from headrace.errors import ResourceExhausted
from services.gateway.patience import Patience


async def test_a_write_that_never_ends_is_ended():
    """RESOURCE_EXHAUSTED (SLOW_CONSUMER), and the task itself is not cancelled."""

    async def write(message):
        await asyncio.Event().wait()

    with Patience(write, 0.05) as patience, pytest.raises(ResourceExhausted) as caught:
        await patience.write("x")
    assert caught.value.reason == "SLOW_CONSUMER"
    assert asyncio.current_task().cancelling() == 0
    await asyncio.sleep(0)


async def test_only_the_write_of_the_moment_counts():
    """Many writes, each short, last longer than the limit together; pauses between writes do not count."""
    count = 0

    async def write(message):
        nonlocal count
        await asyncio.sleep(0.01)
        count += 1

    with Patience(write, 0.08) as patience:
        for _ in range(15):
            await patience.write("x")
        await asyncio.sleep(0.2)
        await patience.write("x")
    assert count == 16


async def test_a_cancelled_caller_stays_cancelled():
    """Somebody else's cancel passes through."""
    entered = asyncio.Event()

    async def write(message):
        entered.set()
        await asyncio.Event().wait()

    async def call():
        with Patience(write, 60) as patience:
            await patience.write("x")

    task = asyncio.create_task(call())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_write_passes_through():
    """What the connection says is what the caller hears."""

    async def write(message):
        raise ConnectionError

    with Patience(write, 60) as patience, pytest.raises(ConnectionError):
        await patience.write("x")
