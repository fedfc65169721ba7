"""What the hops cost: CPU time of gateway, stream process and engine edge for each token that clients are given.

The pipeline is real but for the engine's computing (see `null_engine`). The clients live in the measuring process and
are not counted. CPU time is what the kernel has charged to a process, all threads, user and system; unlike wall time
it hardly depends on what else runs on the machine.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from headrace import channels, errors
from headrace.bench.results import RunFailed
from headrace.client import AsyncClient

PROCESSES = ("gateway", "stream", "engine")
KINDS: Mapping[str, dict[str, Any]] = {"stream": {}, "session": {"window": 64}, "resumable": {"resumable": True}}
FIRST_TOKEN_TIMEOUT_S = 30.0
WARM_UP_S = 2.0
_PROMPT = (1000, 2000, 3000, 4000)
_MAX_TOKENS = 1_000_000  # more than any pass takes: no answer ends while it is measured


@dataclass(frozen=True)
class Pass:
    """One measured window."""

    seconds: float
    tokens: int  # given to clients
    messages: int
    cpu_s: Mapping[str, float]  # by process

    def us_a_token(self, process: str) -> float:
        """CPU microseconds a token."""
        return self.cpu_s[process] / self.tokens * 1e6

    @property
    def total_us_a_token(self) -> float:
        """The same over all processes."""
        return sum(map(self.us_a_token, self.cpu_s))

    def as_json(self) -> dict[str, Any]:
        """Numbers by name."""
        return {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "tokens_a_message": self.tokens / self.messages,
            "us_a_token": {**{name: self.us_a_token(name) for name in self.cpu_s}, "total": self.total_us_a_token},
        }


class _Readers:
    """Clients that read endless answers, and what they were given so far."""

    def __init__(self) -> None:
        self.tokens = self.messages = self.started = 0
        self.all_started = asyncio.Event()

    async def read(self, client: AsyncClient, options: dict[str, Any], expected: int) -> None:
        """Reads until cancelled."""
        first = True
        async for delta in client.stream(token_ids=_PROMPT, max_tokens=_MAX_TOKENS, ignore_eos=True, **options):
            self.tokens += delta.token_count
            self.messages += 1
            if first:
                first = False
                self.started += 1
                if self.started == expected:
                    self.all_started.set()
        raise RunFailed("an answer ended while it was measured")


async def measure(
    target: str, pids: Mapping[str, int], *, streams: int, seconds: float, repeat: int, kind: str = "stream"
) -> list[Pass]:
    """Opens `streams` answers, waits until all flow, then measures `repeat` windows of `seconds`.

    Args:
        target: the gateway.
        pids: process ids by name of `PROCESSES`.
        streams: answers at a time, each over a connection of its own.
        seconds: of one window.
        repeat: windows, one after the other.
        kind: a key of `KINDS`.

    Raises:
        RunFailed: a call failed, or nothing came.
    """
    readers = _Readers()
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(target, options=channels.OWN_CONNECTION))
            for _ in range(streams)
        ]
        tasks = [asyncio.create_task(readers.read(client, KINDS[kind], streams)) for client in clients]
        windows = asyncio.create_task(_windows(readers, pids, seconds, repeat))
        try:
            await asyncio.wait([windows, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for reading in tasks:
                if reading.done():
                    reading.result()
            return await windows
        except errors.HeadraceError as error:
            raise RunFailed(f"{type(error).__name__}: {error.message}") from error
        finally:
            windows.cancel()
            for reading in tasks:
                reading.cancel()
            await asyncio.gather(windows, *tasks, return_exceptions=True)


async def _windows(readers: _Readers, pids: Mapping[str, int], seconds: float, repeat: int) -> list[Pass]:
    try:
        await asyncio.wait_for(readers.all_started.wait(), FIRST_TOKEN_TIMEOUT_S)
    except TimeoutError:
        raise RunFailed(f"only {readers.started} answers have begun in {FIRST_TOKEN_TIMEOUT_S:g} s") from None
    await asyncio.sleep(WARM_UP_S)
    passes = []
    for _ in range(repeat):
        before, tokens, messages, begun = cpu_s(pids), readers.tokens, readers.messages, time.monotonic()
        await asyncio.sleep(seconds)
        after = cpu_s(pids)
        if readers.tokens == tokens:
            raise RunFailed("no token came while it was measured")
        passes.append(
            Pass(
                seconds=time.monotonic() - begun,
                tokens=readers.tokens - tokens,
                messages=readers.messages - messages,
                cpu_s={name: after[name] - before[name] for name in pids},
            )
        )
    return passes


def report(passes: Sequence[Pass], coalesce_tokens: int) -> dict[str, Any]:
    """The medians of several passes, and every pass."""
    each = [one.as_json() for one in passes]
    names = each[0]["us_a_token"]
    return {
        "coalesce_tokens": coalesce_tokens,
        "tokens_a_message": statistics.median(one["tokens_a_message"] for one in each),
        "tokens_per_s": statistics.median(one["tokens"] / one["seconds"] for one in each),
        "us_a_token": {name: statistics.median(one["us_a_token"][name] for one in each) for name in names},
        "passes": each,
    }


def cpu_s(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds of each process since its start: the kernel's own clock of a process, as of `clock_getcpuclockid`."""
    return {name: time.clock_gettime((~pid << 3) | 2) for name, pid in pids.items()}
