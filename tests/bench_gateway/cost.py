"""What limits cost a request: the same closed loop through a gateway without keys, and through one with keys in Redis.

The engine computes nothing, so that what is measured is the front door. Turns are taken, so that both see the same
machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import statistics
import time
from typing import Any

from headrace import AsyncClient
from headrace.bench.hops import cpu_s
from headrace.bench.null_engine import TOKENS_PER_S_VARIABLE
from tests.bench_gateway.stage import stage
from tests.pipeline.gateways import Process, start_gateway
from tests.redis_server import RedisServer

REQUESTS = 300  # of a turn
TURNS = 8
MOST_MEDIAN_MS = 1.0
MOST_CPU_US = 300.0
ENGINE = {"engine": "headrace.bench.null_engine"}
RATE = {TOKENS_PER_S_VARIABLE.removeprefix("HEADRACE_"): "100000"}
LIMITS = {
    "requests_per_minute": 10_000_000,
    "tokens_per_minute": 1_000_000_000,
    "concurrent_requests": 1000,
    "tokens_per_day": 10**12,
}


def main() -> dict[str, Any]:
    """Medians over turns of the difference, with one client and with eight."""
    server = RedisServer()
    digest = hashlib.sha256(b"limited").hexdigest()
    server.client.hset("headrace:keys", digest, json.dumps({"tenant": "limited", **LIMITS}))
    try:
        with (
            stage(ENGINE, **RATE) as pipeline,
            start_gateway(pipeline) as free,
            start_gateway(pipeline, REDIS_URL=server.url, GATEWAY_KEYS_IN_REDIS="true") as limited,
        ):
            redis = server.process.pid if server.process is not None else 0
            report = {f"{count} at once": asyncio.run(_measure(free, limited, redis, count)) for count in (1, 8)}
    finally:
        server.close()
    one = report["1 at once"]
    passed = one["limits cost, median ms"] <= MOST_MEDIAN_MS and one["limits cost, CPU us"] <= MOST_CPU_US
    return {**report, "passed": passed}


async def _measure(free: Process, limited: Process, redis: int, clients: int) -> dict[str, Any]:
    async with AsyncClient(free.address) as plain, AsyncClient(limited.address, api_key="limited") as keyed:
        sides = {"free": (plain, free), "limited": (keyed, limited)}
        for client, _ in sides.values():
            await _turn(client, clients, REQUESTS // 2)
        milliseconds: dict[str, list[float]] = {name: [] for name in sides}
        microseconds: dict[str, list[float]] = {name: [] for name in sides}
        redis_us: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(TURNS):
            for name, (client, process) in sides.items():
                before, redis_before = _cpu_s(process), cpu_s({"redis": redis})["redis"]
                took = await _turn(client, clients, REQUESTS)
                milliseconds[name].append(statistics.median(took) * 1e3)
                microseconds[name].append((_cpu_s(process) - before) / REQUESTS * 1e6)
                redis_us[name].append((cpu_s({"redis": redis})["redis"] - redis_before) / REQUESTS * 1e6)
    return {
        "median ms": {name: round(statistics.median(values), 3) for name, values in milliseconds.items()},
        "gateway CPU us": {name: round(statistics.median(values)) for name, values in microseconds.items()},
        "limits cost, median ms": round(_difference(milliseconds), 3),
        "limits cost, CPU us": round(_difference(microseconds)),
        "redis-server CPU us": round(_difference(redis_us)),
    }


def _cpu_s(process: Process) -> float:
    return cpu_s(process.supervisor.pids)["gateway"]


def _difference(values: dict[str, list[float]]) -> float:
    return statistics.median(b - a for a, b in zip(values["free"], values["limited"], strict=True))


async def _turn(client: AsyncClient, clients: int, count: int) -> list[float]:
    """Seconds of each of `count` requests, asked by so many at once."""
    took: list[float] = []

    async def ask() -> None:
        for _ in range(count // clients):
            began = time.monotonic()
            await client.generate(token_ids=[1000, 2000, 3000], max_tokens=1, ignore_eos=True)
            took.append(time.monotonic() - began)

    await asyncio.gather(*(ask() for _ in range(clients)))
    return took
