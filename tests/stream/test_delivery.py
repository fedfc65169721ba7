"""A delivery wakes its writer when something is due, never in vain, and always in the end."""

from __future__ import annotations

import asyncio

from headrace.v1 import engine_pb2
from services.stream.delivery import Delivery
from services.stream.relay import Relay
from services.stream.stops import StopMatcher
from tests.stream.test_relay import Letters


def delivery(count=1, **options):
    relays = [Relay(Letters(), StopMatcher([]), **options) for _ in range(count)]
    return Delivery(relays, 0, lambda token: b"", include_ids=True)


def output(*token_ids, index=0, ending=False):
    message = engine_pb2.GenerationOutput(generation_id=1, index=index, token_ids=token_ids)
    if ending:
        message.ending.finish_reason = 2
    return message


async def taken(made):
    """Waits for the writer's wake-up and takes what is due."""
    async with asyncio.timeout(5):
        await made.wake.wait()
    made.wake.clear()
    pieces = []
    while (delta := made.take()) is not None:
        pieces.append((delta.index, list(delta.token_ids)))
    return pieces


async def test_the_writer_sleeps_until_a_message_is_full():
    """The first token at once; the next three not; the fourth makes it full."""
    made = delivery(coalesce_ns=10**12)
    made.on_output(output(1))
    assert await taken(made) == [(0, [1])]
    for token in (2, 3, 4):
        made.on_output(output(token))
        assert not made.wake.is_set()
    made.on_output(output(5))
    assert await taken(made) == [(0, [2, 3, 4, 5])]


async def test_a_lone_token_leaves_in_time_though_nothing_else_comes():
    """An engine that is paused by credits sends nothing more: the pending token must leave all the same."""
    for _ in range(30):
        made = delivery(coalesce_ns=3_000_000)
        made.on_output(output(1))
        await taken(made)
        made.on_output(output(2))
        assert await taken(made) == [(0, [2])]


async def test_answers_do_not_hold_each_other_back():
    """Two answers: the one that is full leaves, the other waits for its time."""
    made = delivery(count=2, coalesce_tokens=2, coalesce_ns=20_000_000)
    made.on_output(output(1))
    made.on_output(output(1, index=1))
    assert await taken(made) == [(0, [1]), (1, [1])]
    made.on_output(output(2, index=1))
    made.on_output(output(2, 3))
    assert await taken(made) == [(0, [2, 3])]
    assert await taken(made) == [(1, [2])]


async def test_the_ending_wakes_at_once():
    """Whatever is pending leaves with the ending."""
    made = delivery(coalesce_ns=10**12)
    made.on_output(output(1))
    await taken(made)
    made.on_output(output(2))
    made.on_output(output(3, ending=True))
    assert await taken(made) == [(0, [2, 3])]
    assert made.ended
