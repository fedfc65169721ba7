"""One attached stream an engine: news reach their own listener, and a lost engine ends each generation at once."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc.aio
import structlog

from headrace import errors
from headrace.v1 import engine_pb2, engine_pb2_grpc
from services.stream.peers import Engines


class ScriptedEngine(engine_pb2_grpc.EngineServiceServicer):
    """Answers each open with one token, its generation's prompt length; remembers the commands."""

    def __init__(self):
        self.commands: list[str] = []
        self.seen = asyncio.Condition()
        self.attached = 0

    async def Attach(self, requests, context):
        self.attached += 1
        async for request in requests:
            async with self.seen:
                self.commands.append(request.WhichOneof("command"))
                self.seen.notify_all()
            if request.HasField("open"):
                output = engine_pb2.GenerationOutput(
                    generation_id=request.open.generation_id, token_ids=[len(request.open.prompt_token_ids)]
                )
                yield engine_pb2.AttachResponse(outputs=[output])
            if request.HasField("cancel"):
                ending = engine_pb2.GenerationOutput(generation_id=request.cancel.generation_id)
                ending.ending.finish_reason = 3
                yield engine_pb2.AttachResponse(outputs=[ending])

    async def wait_for(self, command):
        async with self.seen, asyncio.timeout(5):
            await self.seen.wait_for(lambda: command in self.commands)


class Listener:
    def __init__(self, *, fails=False):
        self.news: asyncio.Queue[object] = asyncio.Queue()
        self._fails = fails

    def on_output(self, output):
        if self._fails:
            raise ValueError("bad bytes")
        self.news.put_nowait(output)

    def on_lost(self, error):
        self.news.put_nowait(error)

    async def next(self):
        async with asyncio.timeout(5):
            return await self.news.get()


@asynccontextmanager
async def engine():
    servicer, server = ScriptedEngine(), grpc.aio.server()
    engine_pb2_grpc.add_EngineServiceServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    engines = Engines(structlog.get_logger())
    yield servicer, server, engines, address
    await engines.close()
    await server.stop(0)


def opening(length):
    return engine_pb2.OpenGeneration(prompt_token_ids=[7] * length)


async def test_many_generations_share_one_attached_stream():
    """50 generations, one Attach call, each listener its own news."""
    async with engine() as (servicer, _, engines, address):
        listeners = [Listener() for _ in range(50)]
        for length, listener in enumerate(listeners, 1):
            engines.at(address).open(opening(length), listener)
        assert [list((await listener.next()).token_ids) for listener in listeners] == [[n] for n in range(1, 51)]
        assert servicer.attached == 1


async def test_a_lost_engine_ends_every_generation_at_once():
    """Each listener is told UNAVAILABLE; the next generation attaches anew."""
    async with engine() as (_, server, engines, address):
        listeners = [Listener() for _ in range(3)]
        for listener in listeners:
            engines.at(address).open(opening(1), listener)
            await listener.next()
        await server.stop(0)
        for listener in listeners:
            assert isinstance(await listener.next(), errors.Unavailable)
        assert engines.at(address).lost is False
        late = Listener()
        engines.at(address).open(opening(1), late)
        assert isinstance(await late.next(), errors.Unavailable)


async def test_an_unreachable_engine_is_unavailable():
    """Nobody listens there: UNAVAILABLE, at once."""
    engines, listener = Engines(structlog.get_logger()), Listener()
    engines.at("127.0.0.1:1").open(opening(1), listener)
    assert isinstance(await listener.next(), errors.Unavailable)
    await engines.close()


async def test_cancel_reaches_the_engine_and_is_idempotent():
    """Cancelled twice and after its ending: one command, no error."""
    async with engine() as (servicer, _, engines, address):
        listener = Listener()
        generation = engines.at(address).open(opening(1), listener)
        await listener.next()
        generation.cancel()
        await servicer.wait_for("cancel")
        assert (await listener.next()).HasField("ending")
        generation.cancel()
        generation.abandon()
        generation.grant(5)
        probe = Listener()
        engines.at(address).open(opening(1), probe)
        await probe.next()
        assert servicer.commands == ["open", "cancel", "open"]


async def test_one_listeners_fault_hurts_only_itself():
    """A relay that raises is cancelled and told; the others go on."""
    async with engine() as (servicer, _, engines, address):
        bad, good = Listener(fails=True), Listener()
        engines.at(address).open(opening(1), bad)
        engines.at(address).open(opening(2), good)
        assert isinstance(await bad.next(), errors.Internal)
        assert list((await good.next()).token_ids) == [2]
        await servicer.wait_for("cancel")
