"""What tracing costs: pipelines with tracing off, at 10 % and at 100 % under the same load, in turn.

`python -m headrace.bench.tracing` (or `make bench-tracing`). All three pipelines stay up; in each round each gets the
same requests, in an order that changes, so that whatever else the machine does meets all alike: a closed loop of
several clients for throughput, then one client alone for the time to first token. Reported are medians, and the median
over rounds of each against "off" in the same round. Processor time of the four processes is reported too: on a busy
machine it says more than the clock. The collector is a process that takes spans and drops them.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc

from headrace.bench.workloads import FIRST_ID, VOCABULARY_SIZE
from headrace.cli import output
from headrace.cli.pipeline import PipelineOptions, running
from headrace.client import AsyncClient

MODES: Mapping[str, Mapping[str, str]] = {
    "off": {"HEADRACE_TRACE_LEVEL": "0"},
    "10 %": {"HEADRACE_TRACE_SAMPLE_RATIO": "0.1"},
    "100 %": {"HEADRACE_TRACE_SAMPLE_RATIO": "1.0"},
}
MOST_THROUGHPUT_LOST = 0.02
MOST_FIRST_TOKEN_MS = 1.0
_EXPORT = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True)
class Load:
    """A closed loop: each client asks again as soon as it has its answer; then one alone."""

    clients: int = 8
    requests: int = 3  # of each client
    prompt_tokens: int = 32
    output_tokens: int = 32
    alone: int = 8  # requests of the one
    alone_output_tokens: int = 2


@dataclass(frozen=True)
class Round:
    """What one round of one mode gave."""

    tokens_per_s: float
    first_token_ms: float  # of one client alone: median over requests, as the client sees it
    cpu_ms: float  # of the four processes, a request of the closed loop


@dataclass(frozen=True)
class _Pipeline:
    target: str
    pids: Sequence[int]

    def cpu_s(self) -> float:
        """Processor time of its processes so far."""
        ticks = 0
        for pid in self.pids:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])  # user and system
        return ticks / os.sysconf("SC_CLK_TCK")


async def _drive(pipeline: _Pipeline, load: Load, seed: int) -> Round:
    rng = random.Random(seed)  # noqa: S311 - the same prompts for every mode

    async def ask(output_tokens: int) -> float:
        """Milliseconds to the first token."""
        began, first_ms = time.perf_counter(), 0.0
        prompt = [rng.randrange(FIRST_ID, VOCABULARY_SIZE) for _ in range(load.prompt_tokens)]
        async for _ in client.stream(token_ids=prompt, max_tokens=output_tokens, ignore_eos=True, temperature=0):
            first_ms = first_ms or (time.perf_counter() - began) * 1e3
        return first_ms

    async def loop() -> None:
        for _ in range(load.requests):
            await ask(load.output_tokens)

    async with AsyncClient(pipeline.target) as client:
        await client.list_models()
        began, cpu_s = time.perf_counter(), pipeline.cpu_s()
        await asyncio.gather(*(loop() for _ in range(load.clients)))
        took_s, used_s = time.perf_counter() - began, pipeline.cpu_s() - cpu_s
        first_ms = [await ask(load.alone_output_tokens) for _ in range(load.alone)]
    requests = load.clients * load.requests
    return Round(requests * load.output_tokens / took_s, statistics.median(first_ms), used_s * 1e3 / requests)


def _collect(ready: Connection) -> None:
    """A collector that takes everything and keeps nothing."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    take: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(lambda _spans, _context: b"")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_EXPORT, {"Export": take}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ready.send(port)
    ready.recv()


@contextmanager
def _collector() -> Iterator[str]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_collect, args=(there,), daemon=True)
    process.start()
    yield f"http://127.0.0.1:{here.recv()}"
    here.send(None)
    process.join(5)


def measure(rounds: int, load: Load) -> dict[str, list[Round]]:
    """Rounds of each mode."""
    found: dict[str, list[Round]] = {mode: [] for mode in MODES}
    with ExitStack() as stack:
        collector = stack.enter_context(_collector())
        pipelines = {}
        for mode, variables in MODES.items():
            settings = {"HEADRACE_TRACE_ENDPOINT": collector, "HEADRACE_ENGINE_PREFIX_CACHE": "false", **variables}
            options = PipelineOptions(variables=settings, free_by_default=True)
            plan, supervisor = stack.enter_context(running(options))
            pipelines[mode] = _Pipeline(plan.target, list(supervisor.pids.values()))
        for pipeline in pipelines.values():
            asyncio.run(_drive(pipeline, load, seed=0))
        for number in range(rounds):
            order = random.Random(number).sample(list(MODES), len(MODES))  # noqa: S311
            for mode in order:
                found[mode].append(asyncio.run(_drive(pipelines[mode], load, seed=number + 1)))
            sys.stderr.write(f"\rround {number + 1} of {rounds}")
    sys.stderr.write("\n")
    return found


def report(found: Mapping[str, Sequence[Round]]) -> tuple[list[str], bool]:
    """A table, and whether tracing is as cheap as it must be."""
    off = found["off"]
    lines = [
        "tracing    output tok/s    against off    first token ms    against off    cpu ms a request    against off"
    ]
    cheap = True
    for mode, rounds in found.items():
        ratio = statistics.median(r.tokens_per_s / o.tokens_per_s for r, o in zip(rounds, off, strict=True)) - 1
        later_ms = statistics.median(r.first_token_ms - o.first_token_ms for r, o in zip(rounds, off, strict=True))
        cheap = cheap and ratio >= -MOST_THROUGHPUT_LOST and later_ms <= MOST_FIRST_TOKEN_MS
        speed = statistics.median(r.tokens_per_s for r in rounds)
        first_ms = statistics.median(r.first_token_ms for r in rounds)
        cpu_ms = statistics.median(r.cpu_ms for r in rounds)
        more = statistics.median(r.cpu_ms / o.cpu_ms for r, o in zip(rounds, off, strict=True)) - 1
        lines.append(
            f"{mode:<10} {speed:>12.1f} {ratio * 100:>+12.2f} % {first_ms:>17.2f} {later_ms:>+11.2f} ms"
            f" {cpu_ms:>19.1f} {more * 100:>+12.2f} %"
        )
    return lines, cheap


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it; 0 where the budget is kept."""
    parser = argparse.ArgumentParser(prog="headrace.bench.tracing", description="What tracing costs.")
    parser.add_argument("--rounds", type=output.positive, default=15)
    parser.add_argument("--clients", type=output.positive, default=Load.clients)
    arguments = parser.parse_args(argv)
    lines, cheap = report(measure(arguments.rounds, Load(clients=arguments.clients)))
    for line in lines:
        output.stdout().print(line, soft_wrap=True)
    output.stdout().print("within 2 % and 1 ms" if cheap else "over the budget of 2 % and 1 ms")
    return output.OK if cheap else output.FAILED


if __name__ == "__main__":
    raise SystemExit(main())
