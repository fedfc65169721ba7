"""One connection to Redis for many callers: each gets its own answer or none, whatever becomes of the connection."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import pytest

from services.common.shared import SharedStateLost
from services.common.shared_connection import Script, SharedConnection

COUNT = Script("return redis.call('INCR', KEYS[1])")


@pytest.fixture
async def shared(redis_server):
    redis_server.client.flushall()
    made = SharedConnection(redis_server.url, 5)
    yield made
    await made.close()


@pytest.fixture
async def fragile(own_redis_server):
    made = SharedConnection(own_redis_server.url, 0.3)
    yield made
    await made.close()


async def test_each_gets_its_own_answer(shared, redis_server):
    """Also while others stop listening at any moment; what those asked is done all the same, once."""
    draw = random.Random(3)
    texts = [f"{number}," * draw.randint(1, 5000) for number in range(500)]

    async def one(text: str) -> bytes:
        await asyncio.sleep(draw.random() / 20)
        await shared.run(COUNT, ("count",))
        return await shared.ask("ECHO", text)

    tasks = [asyncio.create_task(one(text)) for text in texts]
    while not all(task.done() for task in tasks[::2]):
        draw.choice(tasks[1::2]).cancel()
        await asyncio.sleep(0)
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert answers[::2] == [text.encode() for text in texts[::2]]
    heard = sum(isinstance(answer, bytes) for answer in answers)
    assert heard <= int(redis_server.client.get("count")) <= 500


async def test_commands_of_one_moment_leave_together(shared, redis_server):
    """A hundred commands are read by Redis in a few pieces."""
    await shared.ask("PING")
    before = redis_server.client.info("stats")["total_reads_processed"]
    assert await asyncio.gather(*(shared.ask("ECHO", number) for number in range(100)))
    assert redis_server.client.info("stats")["total_reads_processed"] - before <= 5


async def test_a_forgotten_script_runs_once(shared, redis_server):
    """Each of many that find it gone, in order or not."""
    for _ in range(3):
        redis_server.client.script_flush()
        await asyncio.gather(*(shared.run(COUNT, ("count",)) for _ in range(20)))
    assert int(redis_server.client.get("count")) == 60


async def test_a_refusal_of_redis_is_of_one_command(shared):
    """The others of the same write are answered."""
    bad, good = shared.ask("INCR"), shared.ask("ECHO", "a")
    with pytest.raises(SharedStateLost, match="ResponseError"):
        await bad
    assert await good == b"a"


async def test_an_idle_connection_that_was_closed_costs_nothing(shared, redis_server):
    """The next command is answered over a new one."""
    for _ in range(3):
        assert await shared.ask("PING") == b"PONG"
        closed = shared._wire.lost
        redis_server.client.client_kill_filter(_type="normal", skipme=True)
        await closed
        assert await asyncio.gather(shared.ask("PING"), shared.ask("PING")) == [b"PONG", b"PONG"]


async def test_a_redis_that_is_paused(fragile, own_redis_server):
    """Everything under way fails in time; afterwards no late answer reaches anybody."""
    assert await fragile.ask("ECHO", "before") == b"before"
    own_redis_server.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    answers = await asyncio.gather(*(fragile.ask("ECHO", f"{n}") for n in range(20)), return_exceptions=True)
    assert all(isinstance(answer, SharedStateLost) for answer in answers)
    again = await asyncio.gather(fragile.ask("ECHO", "connects in vain"), return_exceptions=True)
    assert isinstance(again[0], SharedStateLost)
    assert time.monotonic() - began < 2
    own_redis_server.process.send_signal(signal.SIGCONT)
    assert await fragile.ask("ECHO", "after") == b"after"


async def test_a_redis_that_is_restarted(fragile, own_redis_server):
    """Commands fail at once while it is away, and are answered when it is back."""
    assert await fragile.ask("PING") == b"PONG"
    own_redis_server.stop()
    with pytest.raises(SharedStateLost):
        await fragile.ask("PING")
    own_redis_server.start()
    assert await fragile.ask("PING") == b"PONG"


async def test_closing_answers_everybody(fragile, own_redis_server):
    """Who still waits is told that there will be no answer."""
    await fragile.ask("PING")
    own_redis_server.process.send_signal(signal.SIGSTOP)
    asked = [fragile.ask("PING") for _ in range(3)]
    await asyncio.sleep(0)
    await fragile.close()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(answer, SharedStateLost) for answer in answers)
    own_redis_server.process.send_signal(signal.SIGCONT)


async def test_what_is_no_redis_is_left():
    """An answer that makes no sense drops the connection."""

    async def answer(reader, writer) -> None:
        while await reader.readline():
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    made = SharedConnection(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0", 1)
    with pytest.raises(SharedStateLost):
        await made.ask("PING")
    await made.close()
    server.close()
