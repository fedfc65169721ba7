"""Resumable deliveries over several stream processes that share one replay log: one owner at a time, nothing lost."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
import structlog

from headrace import errors
from headrace.v1 import engine_pb2, stream_pb2
from services.stream.delivery import Delivery
from services.stream.relay import Relay
from services.stream.replay import MemoryLog
from services.stream.sessions import Sessions
from services.stream.stops import StopMatcher
from tests.stream.test_relay import Letters

TOKENS = 12


class Generation:
    """The engine's side of one opening: gives tokens after those that were made, as far as credits reach."""

    def __init__(self, command, listener):
        self.command, self._listener = command, listener
        self._next = len(command.generated_token_ids)
        self._granted = self._next
        self.grant(command.credit_count)

    def grant(self, credit_count, index=0):
        self._granted += credit_count
        while self._listener is not None and self._next < min(self._granted, TOKENS):
            self._next += 1
            output = engine_pb2.GenerationOutput(token_ids=[self._next])
            if self._next == TOKENS:
                output.ending.finish_reason = 2
            self._listener.on_output(output)

    def cancel(self, index=None):
        self.abandon()

    def abandon(self):
        self._listener = None


class Engines:
    """One engine; `opened` are its generations."""

    def __init__(self):
        self.opened = []

    def at(self, address):
        return self

    def open(self, command, listener):
        self.opened.append(Generation(command, listener))
        return self.opened[-1]


@asynccontextmanager
async def processes(count):
    """Stream processes that share a log."""
    log = MemoryLog(60)

    def build(opening):
        relay = Relay(Letters(), StopMatcher([]), coalesce_tokens=1)
        made = Delivery([relay], 0, lambda token: b"", include_ids=True, resumable=True)
        made.prompt_token_count = 1
        return made

    options = {"detached_s": 60, "engine_retry_s": 1, "diagnostics": structlog.get_logger()}
    made = [Sessions(build, Engines(), log, **options) for _ in range(count)]
    yield made
    for sessions in made:
        await sessions.close()


def opening(credit_count=4):
    generation = engine_pb2.OpenGeneration(prompt_token_ids=[1], credit_count=credit_count)
    return stream_pb2.DeliverOpen(stream_id="s", tenant="t", engine_address="e", generation=generation)


def resuming(last, credit_count=4, tenant="t"):
    return stream_pb2.DeliverResume(stream_id="s", tenant=tenant, last_sequence_number=last, credit_count=credit_count)


async def read(session, first, credit_count, token_count):
    """The next `token_count` token ids, and the number of the message after them."""
    ids, number = [], first
    entries = session.read(first, credit_count)
    async with asyncio.timeout(5):
        while len(ids) < token_count:
            entry = await anext(entries)
            ids, number = ids + list(entry.delta.token_ids), entry.sequence_number + 1
    await entries.aclose()
    return ids, number


async def test_a_stream_goes_from_process_to_process_and_back():
    """Taken over by another process, and by the first again: every token once, in order."""
    async with processes(2) as (one, two):
        first, number = await read(await one.open(opening()), 0, 4, 4)
        second, number = await read(await two.resume(resuming(number - 1)), number, 4, 4)
        third, _ = await read(await one.resume(resuming(number - 1, credit_count=99)), number, 99, 4)
    assert first + second + third == list(range(1, TOKENS + 1))


async def test_an_owner_that_was_only_thought_dead_sends_nothing_more():
    """After a take-over the old owner's reader ends ABORTED, whatever its engine still brings."""
    async with processes(2) as (one, two):
        session = await one.open(opening())
        _, number = await read(session, 0, 4, 4)
        await two.resume(resuming(number - 1))
        with pytest.raises(errors.Aborted):
            await read(session, number, 4, 1)


async def test_a_resume_here_keeps_the_generation():
    """In the process that owns it nothing is opened anew."""
    async with processes(1) as (one,):
        _, number = await read(await one.open(opening()), 0, 4, 4)
        assert (await read(await one.resume(resuming(number - 1)), number, 4, 4))[0] == [5, 6, 7, 8]
        assert len(one._engines.opened) == 1


@pytest.mark.parametrize("process", [0, 1])
async def test_another_tenants_stream_is_not_found(process):
    """Neither where it is, nor from the log."""
    async with processes(2) as sessions:
        await sessions[0].open(opening())
        with pytest.raises(errors.NotFound):
            await sessions[process].resume(resuming(-1, tenant="other"))
