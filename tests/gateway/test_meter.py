"""The account is kept whatever becomes of Redis: decisions stay quick, limits hold, each ending is written once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import time

import pytest
import structlog

from headrace import errors
from services.common.metrics import Metrics
from services.gateway.identity import Identity, Limits
from services.gateway.meter import Meter
from services.gateway.quota import Charge, MemoryQuotas, Usage
from services.gateway.redis_quota import RedisQuotas

LOG = structlog.stdlib.get_logger()
IDENTITY = Identity("acme", "0123456789ab", limits=Limits(requests_per_minute=10, tokens_per_day=100_000))

IDENTITY_WIDE = Identity("acme", "fedcba987654", limits=Limits(tokens_per_day=10_000_000))


def usage(name: str) -> Usage:
    return Usage(name, "acme", IDENTITY.key_id, "m", "Generate", prompt_tokens=3)


@contextlib.asynccontextmanager
async def meter(url: str):
    made = Meter(RedisQuotas(url), MemoryQuotas(), 0.5, Metrics(), LOG)
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await made.close(5)


async def admitted(made: Meter, wanted: int, name: str) -> tuple[int, float]:
    """Requests that get in, and the longest decision."""
    let_in, slowest = 0, 0.0
    for number in range(wanted):
        began = time.perf_counter()
        with contextlib.suppress(errors.ResourceExhausted):
            async with made.hold(IDENTITY, usage(f"{name}-{number}"), 10) as used:
                let_in += 1
                slowest = max(slowest, time.perf_counter() - began)
                used.completion_tokens, used.outcome = 4, "stop"
        slowest = max(slowest, time.perf_counter() - began)
    return let_in, slowest


async def until(condition, what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


def written(server) -> list[dict]:
    return [json.loads(fields[b"usage"]) for _, fields in server.client.xrange("headrace:usage")]


@pytest.mark.parametrize("trouble", ["stopped", "paused"])
async def test_redis_gone(own_redis_server, trouble):
    """Half the limit is granted here, no decision waits, and what was used is written down when it is back."""
    async with meter(own_redis_server.url) as made:
        assert (await admitted(made, 3, "before"))[0] == 3
        await until(lambda: len(written(own_redis_server)) == 3, "settled")
        if trouble == "stopped":
            own_redis_server.stop()
        else:
            own_redis_server.process.send_signal(signal.SIGSTOP)
        let_in, slowest = await admitted(made, 20, trouble)
        assert let_in == 5
        assert slowest < 0.1
        assert not made.reachable
        if trouble == "stopped":
            own_redis_server.start()
        else:
            own_redis_server.process.send_signal(signal.SIGCONT)
        await until(lambda: made.reachable and not made.unsettled_count, "healed")
        ids = [record["request_id"] for record in written(own_redis_server)]
        assert len(ids) == len(set(ids)) == (5 if trouble == "stopped" else 8)
        assert all(own_redis_server.client.ttl(key) > 0 for key in own_redis_server.client.keys("headrace:quota:*:*"))


async def test_redis_is_found_again_without_a_request(own_redis_server):
    """Also with nothing to settle."""
    async with meter(own_redis_server.url) as made:
        own_redis_server.stop()
        await admitted(made, 1, "alone")
        assert not made.reachable
        made._settlements._waiting.clear()
        own_redis_server.start()
        await until(lambda: made.reachable, "healed")


class SlowNetwork:
    """Passes everything on to Redis, each piece `delay_s` later."""

    def __init__(self, port: int) -> None:
        self._port, self.delay_s = port, 0.0
        self._pumps: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self) -> str:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def _accept(self, reader, writer) -> None:
        self._writers.append(writer)
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(far_writer)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(task)

    async def _pump(self, source, sink) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                await asyncio.sleep(self.delay_s)
                sink.write(data)
        sink.close()

    async def close(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.1])
async def test_callers_that_leave_leave_nothing(redis_server, delay_s):
    """500 that leave at any point of a decision behind a slow network: no lease is left, no answer is another's."""
    redis_server.client.flushall()
    network = SlowNetwork(redis_server.port)
    async with meter(await network.open()) as made:
        network.delay_s = delay_s
        draw = random.Random(5)

        async def one(number: int) -> None:
            async with made.hold(IDENTITY_WIDE, usage(f"c{number}"), 10):
                await asyncio.sleep(0.002)

        tasks = [asyncio.create_task(one(number)) for number in range(500)]
        while any(not task.done() for task in tasks):
            for task in draw.sample(tasks, 25):
                task.cancel()
            await asyncio.sleep(0.001)
        await asyncio.gather(*tasks, return_exceptions=True)
        network.delay_s = 0.0
        await until(lambda: not made.unsettled_count, "settled", 30)
    await network.close()
    base = f"headrace:quota:{IDENTITY_WIDE.key_id}"
    assert redis_server.client.zcard(f"{base}:leases") == 0
    assert redis_server.client.hlen(f"{base}:data") == 0
    records = written(redis_server)
    spent = sum(int(redis_server.client.get(key)) for key in redis_server.client.keys(f"{base}:day:*"))
    assert spent == sum(record["prompt_tokens"] + record["completion_tokens"] for record in records)
    assert len({record["request_id"] for record in records}) == len(records)


async def test_settling_keeps_up_behind_a_slow_network(redis_server):
    """300 endings, each of whose answers takes a fifth of a second, are settled in a few of those, not in 300."""
    redis_server.client.flushall()
    network = SlowNetwork(redis_server.port)
    async with meter(await network.open()) as made:
        assert (await admitted(made, 1, "first"))[0] == 1
        network.delay_s = 0.1
        for number in range(300):
            made._settlements.add(
                Charge(f"s{number}", IDENTITY_WIDE.key_id, IDENTITY_WIDE.limits, 10), usage(f"s{number}")
            )
        began = time.monotonic()
        await until(lambda: not made.unsettled_count, "settled")
        assert time.monotonic() - began < 2
    await network.close()
    assert len(written(redis_server)) == 301


async def test_a_refusal_says_which_limit_and_when(redis_server):
    """RESOURCE_EXHAUSTED with a retry time and the quota, as standard details; nothing is charged."""
    redis_server.client.flushall()
    async with meter(redis_server.url) as made:
        assert (await admitted(made, 12, "q"))[0] == 10
        with pytest.raises(errors.ResourceExhausted) as caught:
            async with made.hold(IDENTITY, usage("late"), 10):
                pass
    error = errors.from_status(errors.to_status(caught.value))
    assert (error.reason, error.quota) == ("QUOTA_EXCEEDED", "requests_per_minute=10")
    assert 0 < error.retry_after_s <= 6


async def test_an_anonymous_caller_asks_nobody():
    """No key, no account."""
    made = Meter(None, MemoryQuotas(), 1.0, Metrics(), LOG)
    async with made.hold(Identity(), usage("a"), 10**9):
        pass
    await made.close()
