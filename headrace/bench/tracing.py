"""What tracing costs: the same load with tracing off, at 10 % and at 100 %, in turn.

`python -m headrace.bench.tracing` (or `make bench-tracing`) measures twice, in rounds; in each, each mode gets the same
requests, in an order that changes, so that whatever else the machine does meets all alike.

1. By the clock, with the real engine: throughput of a closed loop of several clients, and the time to the first token
   of one client alone. All modes are the same processes, so that no luck of a process at its start is taken for a cost:
   the callers say which requests are traced (the flag of `traceparent`; of the others nothing is kept).
2. By processor time, with an engine that computes nothing, where the cost is not lost in what computing costs: a
   pipeline for each mode, "off" being level 0. This is the tight figure, as it hardly depends on what else runs. As a
   share of a request with the real engine it bounds the throughput that can be lost.

All are medians over pairs with "off" in the same round, with bootstrap intervals; `tracing_report` has the verdict.
With `--collectors` the modes are collectors that are well and that are not, each with a pipeline of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass

from headrace.bench.collectors import MOODS, WELL, collector
from headrace.bench.hops import cpu_s
from headrace.bench.null_engine import TOKENS_PER_S_VARIABLE
from headrace.bench.tracing_report import Measured, costs_of, judge, lines_of
from headrace.bench.workloads import FIRST_ID, VOCABULARY_SIZE
from headrace.cli import output
from headrace.cli.pipeline import PipelineOptions, running
from headrace.cli.supervisor import OnLine
from headrace.client import AsyncClient

NULL_ENGINE_RATE = 20_000  # tokens a second of the engine that computes nothing
SETTLE_S = 0.6  # after a closed loop: by then its spans are exported, and count as its own


@dataclass(frozen=True)
class Mode:
    """How much is traced, and where it goes. Modes with the same settings and collector are the same processes.

    Attributes:
        settings: variables of the services.
        mood: of the collector.
        sampled: share of the requests that callers want traced; None: left to the settings.
    """

    settings: tuple[tuple[str, str], ...] = ()
    mood: str = WELL
    sampled: float | None = None


OFF = "off"
_AS_CALLERS_SAY = (("HEADRACE_TRACE_LATE", "false"),)
BY_CALLERS = {
    OFF: Mode(_AS_CALLERS_SAY, sampled=0.0),
    "10 %": Mode(_AS_CALLERS_SAY, sampled=0.1),
    "100 %": Mode(_AS_CALLERS_SAY, sampled=1.0),
}
BY_SETTINGS = {
    OFF: Mode((("HEADRACE_TRACE_LEVEL", "0"),)),
    "10 %": Mode((("HEADRACE_TRACE_SAMPLE_RATIO", "0.1"),)),
    "100 %": Mode((("HEADRACE_TRACE_SAMPLE_RATIO", "1.0"),)),
}
BY_COLLECTORS = {mood: Mode(mood=mood) for mood in MOODS}


@dataclass(frozen=True)
class Load:
    """A closed loop: each client asks again as soon as it has its answer; then one alone."""

    clients: int = 8
    requests: int = 3  # of each client
    prompt_tokens: int = 32
    output_tokens: int = 32
    alone: int = 8  # requests of the one
    alone_output_tokens: int = 2


class _Caller:
    """A client that asks as a mode has it."""

    def __init__(self, client: AsyncClient, pids: Mapping[str, int], mode: Mode, load: Load) -> None:
        self._client, self._pids, self._mode, self._load = client, pids, mode, load
        self._flags = random.Random(0)  # noqa: S311 - which requests are traced; prompts have their own

    def cpu_s(self) -> float:
        """Processor time of the processes so far."""
        return sum(cpu_s(self._pids).values())

    async def ask(self, rng: random.Random, output_tokens: int) -> float:
        """Asks once; milliseconds to the first token."""
        prompt = [rng.randrange(FIRST_ID, VOCABULARY_SIZE) for _ in range(self._load.prompt_tokens)]
        began, first_ms = time.perf_counter(), 0.0
        stream = self._client.stream(
            token_ids=prompt, max_tokens=output_tokens, ignore_eos=True, temperature=0, headers=self._headers()
        )
        async for _ in stream:
            first_ms = first_ms or (time.perf_counter() - began) * 1e3
        return first_ms

    async def closed_loop(self, seed: int) -> tuple[float, float]:
        """All clients ask: tokens a second, and milliseconds of processor time a request."""
        rng, load = random.Random(seed), self._load  # noqa: S311 - the same prompts for every mode

        async def one() -> None:
            for _ in range(load.requests):
                await self.ask(rng, load.output_tokens)

        requests = load.clients * load.requests
        mark, began = self.cpu_s(), time.perf_counter()
        await asyncio.gather(*(one() for _ in range(load.clients)))
        tokens_per_s = requests * load.output_tokens / (time.perf_counter() - began)
        await asyncio.sleep(SETTLE_S)
        return tokens_per_s, (self.cpu_s() - mark) * 1e3 / requests

    def _headers(self) -> dict[str, str]:
        if self._mode.sampled is None:
            return {}
        trace_id, span_id = self._flags.getrandbits(128) or 1, self._flags.getrandbits(64) or 1
        flag = int(self._flags.random() < self._mode.sampled)
        return {"traceparent": f"00-{trace_id:032x}-{span_id:016x}-{flag:02x}"}


@dataclass
class _Processes:
    """One running pipeline."""

    target: str
    pids: Mapping[str, int]
    lines: list[str]


def measure(
    modes: Mapping[str, Mode], seconds: float, load: Load, *, null_engine: bool = False
) -> tuple[dict[str, Measured], int, int]:
    """Drives pipelines as the modes need them; what each mode gave, and the spans exported and dropped in all."""
    started: dict[tuple[object, ...], _Processes] = {}
    with ExitStack() as stack:
        for mode in modes.values():
            if (mode.settings, mode.mood) not in started:
                started[mode.settings, mode.mood] = _start(stack, mode, null_engine=null_engine)
        targets = {name: (started[mode.settings, mode.mood], mode) for name, mode in modes.items()}
        found = asyncio.run(_drive(targets, seconds, load))
    well = [p for (_, mood), p in started.items() if mood == WELL]
    ended = [json.loads(line) for processes in well for line in processes.lines if '"stopped"' in line]
    return found, sum(one["spans_exported"] for one in ended), sum(one["spans_dropped"] for one in ended)


def _start(stack: ExitStack, mode: Mode, *, null_engine: bool) -> _Processes:
    lines: list[str] = []
    keep: OnLine = lambda _, line: lines.append(line)  # noqa: E731 - typed
    settings = {
        "HEADRACE_TRACE_ENDPOINT": stack.enter_context(collector(mode.mood)),
        "HEADRACE_ENGINE_PREFIX_CACHE": "false",
        "HEADRACE_LOG_FORMAT": "json",
        TOKENS_PER_S_VARIABLE: str(NULL_ENGINE_RATE),
        **dict(mode.settings),
    }
    modules = {"engine": "headrace.bench.null_engine"} if null_engine else {}
    options = PipelineOptions(variables=settings, free_by_default=True, modules=modules)
    plan, supervisor = stack.enter_context(running(options, on_line=keep))
    return _Processes(plan.target, dict(supervisor.pids), lines)


async def _drive(targets: Mapping[str, tuple[_Processes, Mode]], seconds: float, load: Load) -> dict[str, Measured]:
    """Rounds until the time is up, after one for warming up."""
    found = {name: Measured() for name in targets}
    async with AsyncExitStack() as stack:
        callers = {
            name: _Caller(await stack.enter_async_context(AsyncClient(processes.target)), processes.pids, mode, load)
            for name, (processes, mode) in targets.items()
        }
        for caller in callers.values():
            await caller.closed_loop(seed=0)
        ends, number = time.monotonic() + seconds, 0
        while time.monotonic() < ends:
            number += 1
            rng = random.Random(number)  # noqa: S311 - repeatable on purpose
            for name in rng.sample(list(callers), len(callers)):
                tokens_per_s, cpu_ms = await callers[name].closed_loop(seed=number)
                found[name].tokens_per_s.append(tokens_per_s)
                found[name].cpu_ms.append(cpu_ms)
            for request in range(load.alone):
                for name in rng.sample(list(callers), len(callers)):
                    same = random.Random(f"{number} {request}")  # noqa: S311
                    found[name].first_token_ms.append(await callers[name].ask(same, load.alone_output_tokens))
            sys.stderr.write(f"\rround {number}, {max(0.0, ends - time.monotonic()):.0f} s are left  ")
    sys.stderr.write("\n")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs it; 0 where the budget is kept."""
    parser = argparse.ArgumentParser(prog="headrace.bench.tracing", description="What tracing costs.")
    parser.add_argument("--seconds", type=output.seconds, default=150.0, help="by the clock (%(default)s)")
    parser.add_argument("--cpu-seconds", type=output.seconds, default=40.0, help="by processor time (%(default)s)")
    parser.add_argument("--collectors", action="store_true", help="tracing at 100 %%, by what the collector does")
    arguments = parser.parse_args(argv)
    by_clock, by_cpu = (BY_COLLECTORS, BY_COLLECTORS) if arguments.collectors else (BY_CALLERS, BY_SETTINGS)
    real, exported, dropped = measure(by_clock, arguments.seconds, Load())
    null, more, more_dropped = measure(by_cpu, arguments.cpu_seconds, Load(requests=8), null_engine=True)
    costs = costs_of(real, null)
    verdicts, kept = judge(costs, dropped + more_dropped)
    spans = f"{exported + more} spans exported, {dropped + more_dropped} dropped"
    for line in (*lines_of("real engine", real), *lines_of("null engine", null), spans, *verdicts):
        output.stdout().print(line, soft_wrap=True)
    return output.OK if kept else output.FAILED


if __name__ == "__main__":
    raise SystemExit(main())
