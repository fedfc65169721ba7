"""Two tenants on one engine: how long the quiet one waits for its first token, alone and beside the other's flood.

The flood's clients are a process of their own (`python -m tests.bench_gateway.tenants TARGET`): nowhere do they share
an event loop with whoever measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import sys
import time
from typing import Any

from headrace import AsyncClient, errors
from headrace.bench.results import quantile
from headrace.bench.workloads import FIRST_ID, VOCABULARY_SIZE
from tests.bench_gateway.stage import keys, stage
from tests.pipeline.gateways import start_gateway

FLOOD_CLIENTS = 96
QUIET_REQUESTS = 12  # of a phase
ROUNDS = 2
PROMPT_TOKENS = 256
FLOOD_PROMPT_TOKENS = 32
OUTPUT_TOKENS = (16, 112)  # of the flood: at least, at most; so that not all end together
MOST_RATIO = 1.5
PAUSE_S = 0.2
START_S = 4  # until the flood's process has started and its first requests run
# What an operator can set: nothing; 75 % of the knee; that, and a limit of the flooding key.
SETTINGS: dict[str, tuple[dict[str, str], dict[str, object]]] = {
    "nothing set": ({}, {}),
    "75 % of the knee": ({"GATEWAY_LOAD_SHARE": "0.75", "GATEWAY_KNEE": "16"}, {}),
    "the flood has 4 at once": ({}, {"concurrent_requests": 4}),
    "the flood has 2 at once": ({}, {"concurrent_requests": 2}),
}


def main() -> dict[str, Any]:
    """Each setting in turn, each phase beside the other: milliseconds to the quiet tenant's first token."""
    report: dict[str, Any] = {}
    with stage(ENGINE_PROFILE="throughput") as pipeline:
        for name, (settings, limits) in SETTINGS.items():
            with (
                keys(quiet={}, flood=limits) as path,
                start_gateway(pipeline, GATEWAY_KEYS_FILE=str(path), **settings) as gateway,
            ):
                report[name] = asyncio.run(_measure(gateway.address))
            sys.stderr.write(f"{name}: {report[name]}\n")
    report["passed"] = any(one["p95 ratio"] <= MOST_RATIO for one in report.values())
    return report


async def _measure(target: str) -> dict[str, Any]:
    draw, alone, beside = random.Random(target), [], []  # a port of its own: no prompt comes twice
    async with AsyncClient(target, api_key="quiet") as quiet:
        for _ in range(ROUNDS):
            alone += await _quiet(quiet, draw)
            flood = await asyncio.create_subprocess_exec(sys.executable, "-m", __spec__.name, target)
            await asyncio.sleep(START_S)
            beside += await _quiet(quiet, draw)
            flood.kill()
            await flood.wait()
            await asyncio.sleep(2)
    return {
        "alone p50, p95": [round(quantile(alone, share) * 1e3, 1) for share in (0.5, 0.95)],
        "beside p50, p95": [round(quantile(beside, share) * 1e3, 1) for share in (0.5, 0.95)],
        "p50 ratio": round(statistics.median(beside) / statistics.median(alone), 2),
        "p95 ratio": round(quantile(beside, 0.95) / quantile(alone, 0.95), 2),
    }


async def _quiet(client: AsyncClient, draw: random.Random) -> list[float]:
    """Requests one after the other; seconds to each first token."""
    waits = []
    for _ in range(QUIET_REQUESTS):
        began = time.monotonic()
        async with contextlib.aclosing(_deltas(client, draw, PROMPT_TOKENS, 16)) as deltas:
            async for _ in deltas:
                waits.append(time.monotonic() - began)
                break
        await asyncio.sleep(PAUSE_S * draw.random())
    return waits


async def _flood(target: str) -> None:
    """Clients that ask for ever, and when refused again after the time they were told, more or less."""
    draw = random.Random()

    async def ask(client: AsyncClient) -> None:
        while True:
            try:
                async for _ in _deltas(client, draw, FLOOD_PROMPT_TOKENS, draw.randint(*OUTPUT_TOKENS)):
                    pass
            except errors.ResourceExhausted as refused:
                await asyncio.sleep(min(1.0, refused.retry_after_s or 1.0) * draw.uniform(0.5, 1.5))

    async with AsyncClient(target, api_key="flood") as client:
        await asyncio.gather(*(ask(client) for _ in range(FLOOD_CLIENTS)))


async def _deltas(client: AsyncClient, draw: random.Random, length: int, output: int):  # type: ignore[no-untyped-def]
    prompt = [draw.randint(FIRST_ID, VOCABULARY_SIZE - 1) for _ in range(length)]
    stream = client.stream(token_ids=prompt, max_tokens=output, ignore_eos=True, temperature=0)
    try:
        async for delta in stream:
            yield delta
    finally:
        await stream.aclose()


if __name__ == "__main__":
    asyncio.run(_flood(sys.argv[1]))
