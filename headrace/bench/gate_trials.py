"""The gate tried for real: how often it is red on a pipeline that is 10 % slower, and green on one that is the same.

`python -m headrace.bench.gate_trials` (or `make bench-gate`). Three pipelines of four processes stay up: a baseline,
one like it, and one whose engine is slowed. A trial is what `headrace bench sweep --vary` does: pairs of runs that take
turns, compared. Its verdict goes into a file, and a later go makes the trials that are missing there.

The engine is one that computes nothing and is paced by a clock, so that forty trials can be made on a machine that
others use too; `--engine model` has the real one with the default model, which needs a quiet machine, and longer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace.bench import comparison, execute, fingerprint, null_engine, slowed_engine, sweep
from headrace.bench.comparison import FAIL, PASS, Comparison
from headrace.bench.execute import Measuring, Server
from headrace.bench.kept_runs import Report
from headrace.bench.load.spec import Leg, LoadSpec
from headrace.bench.load.workers import Where
from headrace.bench.metrics import Slo
from headrace.bench.statistics import FEWEST_PAIRS
from headrace.cli import output, up
from headrace.cli.pipeline import PipelineOptions, running
from headrace.models import cache_dir

SLOWDOWN = 0.1
WANTED = {"slower": FAIL, "same": PASS}  # the verdict of a trial, by what the candidate is
TRIALS, NEEDED = 20, 0.95
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Engine:
    """An engine and how it is slowed."""

    module: str
    variable: str
    usual: str
    slower: str
    load: LoadSpec
    settings: Mapping[str, str]


ENGINES = {
    "null": Engine(
        "headrace.bench.null_engine",
        null_engine.TOKENS_PER_S_VARIABLE,
        "12.5",
        f"{12.5 / (1 + SLOWDOWN):.4f}",
        # One at a time: of several it depends on their phase whether they wait for one of the long steps or for two.
        LoadSpec("closed", (Leg(1, requests=24),), prompt="16", output="2"),
        {},
    ),
    "model": Engine(
        "headrace.bench.slowed_engine",
        slowed_engine.SLOWDOWN_VARIABLE,
        "0",
        str(SLOWDOWN),
        LoadSpec("closed", (Leg(8, requests=80),), prompt="64", output="16"),
        {"HEADRACE_ENGINE_KV_MEMORY_UTILIZATION": "0.05"},
    ),
}


class _Runs:
    """Runs that are not kept; see `kept_runs.Runs`."""

    def make(self, spec: LoadSpec, server: Server, measuring: Measuring, change: str) -> Report:
        return {"id": change, **execute.run(spec, server, measuring)[0]}

    def kept(self, _spec: LoadSpec, _server: Server, _measuring: Measuring, _change: str) -> None:
        return None


def trial(engine: Engine, servers: Mapping[str, Server], candidate: str, number: int, pairs: int) -> dict[str, Any]:
    """One trial as it is written down. Args: candidate: of `WANTED`."""
    begun_s, seed = time.monotonic(), 10_000 * (len(WANTED) * number + list(WANTED).index(candidate))
    sides = {"baseline": servers["baseline"], candidate: servers[candidate]}
    measuring = Measuring(Slo(), 1, (engine.load.legs[0].requests or 0) // 2)
    try:
        found = sweep.vary(_Runs(), replace(engine.load, seed=seed), sides, measuring, engine.variable, pairs)[
            candidate
        ]
        verdict, why = found.verdict, _why(found)
    except comparison.Refused as refused:
        verdict, why = "refused", [str(refused)]
    took = {"seconds": round(time.monotonic() - begun_s, 1), "load_average": os.getloadavg()[0]}
    return {"candidate": candidate, "trial": number, "verdict": verdict, "why": why, **took}


def summary(made: Sequence[Mapping[str, Any]]) -> tuple[list[str], bool]:
    """Lines for people, and whether all trials were made and enough of them are right."""
    lines, good = [], True
    for candidate, wanted in WANTED.items():
        own = [one for one in made if one["candidate"] == candidate]
        right = sum(one["verdict"] == wanted for one in own)
        lines.append(f"{candidate}: {right} of {len(own)} {wanted}")
        lines += [
            f"  trial {one['trial']}: {one['verdict']}: {'; '.join(one['why'])}"
            for one in own
            if one["verdict"] != wanted
        ]
        good = good and len(own) >= TRIALS and right >= NEEDED * len(own)
    return lines, good


def main(argv: Sequence[str] | None = None) -> int:
    """Makes the trials that are missing; 0 where enough are right."""
    parser = argparse.ArgumentParser(prog="headrace.bench.gate_trials", description="The gate tried for real.")
    parser.add_argument("--engine", choices=tuple(ENGINES), default="null", help="(%(default)s)")
    parser.add_argument("--trials", type=output.positive, default=TRIALS, help="of each kind (%(default)s)")
    parser.add_argument(
        "--pairs", type=output.positive, default=8, help=f"of a trial, at least {FEWEST_PAIRS} (%(default)s)"
    )
    parser.add_argument("--at-most", type=output.positive, metavar="N", help="trials in this go (all)")
    parser.add_argument("--results", type=Path, default=cache_dir() / "bench-gate.jsonl", metavar="FILE")
    arguments = parser.parse_args(argv)
    engine = ENGINES[arguments.engine]
    mine = {"engine": arguments.engine, "pairs": arguments.pairs, "code": fingerprint.versions()["code"]}
    made = [one for one in _read(arguments.results) if mine.items() <= one.items()]
    done = {(one["candidate"], one["trial"]) for one in made}
    missing = [(name, number) for number in range(arguments.trials) for name in WANTED if (name, number) not in done]
    console = output.stdout()
    with ExitStack() as stack:
        now = missing[: arguments.at_most]
        servers = {name: stack.enter_context(_server(engine, name)) for name in ("baseline", *WANTED)} if now else {}
        for name, number in now:
            one = {**mine, **trial(engine, servers, name, number, arguments.pairs)}
            with arguments.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(one) + "\n")
            made.append(one)
            console.print(
                f"trial {number}, {name}: {one['verdict']} in {one['seconds']:.0f} s {'; '.join(one['why'])}",
                soft_wrap=True,
            )
    lines, good = summary(made)
    for line in lines:
        console.print(line, soft_wrap=True)
    return output.OK if good else output.FAILED


@contextmanager
def _server(engine: Engine, name: str) -> Iterator[Server]:
    value = engine.slower if name == "slower" else engine.usual
    settings = {**engine.settings, engine.variable: value}
    options = PipelineOptions(settings, free_by_default=True, modules={"engine": engine.module})
    up.prepare(options)
    with running(options) as (planned, supervisor):
        yield Server(Where(planned.target, {}, TIMEOUT_S), settings, dict(supervisor.pids))


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _why(found: Comparison) -> list[str]:
    return [f"{row.figure.name}: {row.why}" for row in found.rows if row.why] + list(found.notes)


if __name__ == "__main__":
    sys.exit(main())
