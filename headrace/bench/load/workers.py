"""The client processes of a run: started, begun together, watched, and their records gathered.

Each has an event loop of its own and its share of the conversations. What a process itself used and suffered comes
with its records: a client that had no time for its requests measured itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from headrace.bench.load.driver import Driver
from headrace.bench.load.spec import LoadSpec
from headrace.bench.load.target import GrpcTarget, RequestFailed
from headrace.bench.records import Record
from headrace.bench.results import RunFailed

START_DELAY_S = 0.2  # from the word to begin to the beginning
REPORT_PERIOD_S = 0.25
READY_TIMEOUT_S = 120.0

OnProgress = Callable[[int, int], None]  # requests and tokens so far


@dataclass(frozen=True)
class Where:
    """How a client process reaches the server."""

    address: str  # host:port of the gateway
    keys: Mapping[str, str]  # API key of each tenant
    timeout_s: float  # of a request

    @property
    def any_key(self) -> str | None:
        """For what is no tenant's request; None without tenants."""
        return next(iter(self.keys.values()), None)


@dataclass(frozen=True)
class ClientUse:
    """What a client process used, from the start of the run to its last answer."""

    wall_s: float
    cpu_s: float
    lags_s: Sequence[float]  # how late its event loop was, fifty times a second


def run(spec: LoadSpec, where: Where, processes: int, progress: OnProgress) -> tuple[list[Record], list[ClientUse]]:
    """Makes a load; returns its records in the order of sending, and one `ClientUse` a process.

    Raises:
        RunFailed: a process cannot connect, or dies.
    """
    context = multiprocessing.get_context("spawn")
    started: dict[Connection, SpawnProcess] = {}
    try:
        for number in range(processes):
            here, there = context.Pipe()
            process = context.Process(target=_client, args=(there, spec, where, number, processes), daemon=True)
            process.start()
            there.close()
            started[here] = process
        for connection in started:
            _expect(connection, READY_TIMEOUT_S)
        start = time.monotonic() + START_DELAY_S
        for connection in started:
            connection.send(start)
        return _gather(list(started), progress)
    finally:
        for connection, process in started.items():
            connection.close()
            process.join(5.0)
            if process.is_alive():
                process.kill()


def _gather(connections: Sequence[Connection], progress: OnProgress) -> tuple[list[Record], list[ClientUse]]:
    records: list[Record] = []
    uses: list[ClientUse] = []
    counts: dict[Connection, tuple[int, int]] = {}
    left = list(connections)
    while left:
        for connection in [one for one in left if one in wait(left)]:
            message = _expect(connection)
            if isinstance(message, tuple):
                counts[connection] = message
                progress(*map(sum, zip(*counts.values(), strict=True)))
                continue
            records += message["records"]
            uses.append(message["use"])
            left.remove(connection)
    return sorted(records, key=lambda record: record.sent_s), uses


def _expect(connection: Connection, timeout_s: float | None = None) -> Any:
    """The next message of a process. Raises RunFailed."""
    try:
        if not connection.poll(timeout_s):
            raise RunFailed(f"a client process was not ready within {timeout_s:.0f} s")
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        raise RunFailed("a client process died") from None
    if isinstance(message, str) and message:
        raise RunFailed(message)
    return message


def _client(parent: Connection, spec: LoadSpec, where: Where, number: int, processes: int) -> None:
    """A client process. Says "" when it is ready, takes the start, says counts, then its records."""
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt, EOFError):
        try:
            asyncio.run(_drive(parent, spec, where, number, processes))
        except RequestFailed as failure:
            parent.send(f"{failure.code}: {failure}")


async def _drive(parent: Connection, spec: LoadSpec, where: Where, number: int, processes: int) -> None:
    requests = tokens = 0

    def count(record: Record) -> None:
        nonlocal requests, tokens
        requests += 1
        tokens += record.output_tokens

    async def report() -> None:
        while True:
            await asyncio.sleep(REPORT_PERIOD_S)
            parent.send((requests, tokens))

    async with GrpcTarget(where.address, where.keys, where.timeout_s) as target:
        driver = Driver(spec, target, number, processes, count)
        parent.send("")
        start = await asyncio.to_thread(parent.recv)
        reporting = asyncio.create_task(report())
        cpu_begun = time.process_time()
        await driver.run(start)
        use = ClientUse(time.monotonic() - start, time.process_time() - cpu_begun, driver.lags_s)
        reporting.cancel()
        parent.send({"records": driver.records, "use": use})
