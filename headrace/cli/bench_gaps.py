"""`headrace bench gaps`: the pause that a long prompt makes in the answers beside it."""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

from rich.table import Table

from headrace.bench import gaps
from headrace.cli import bench_engine, output, up

COLUMNS = ("steady_ms", "gap p50", "gap p99", "p99 / steady", "first token ms")


def add_parser(kinds: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "gaps",
        help="how long a long prompt holds up the answers beside it",
        description="Runs the engine in process with --streams answers, lets a long prompt arrive, and reports the "
        "time between two tokens before it and beside it, in each profile by turns.",
        epilog=output.EXIT_CODES,
    )
    parser.add_argument("--streams", type=output.positive, default=8, metavar="N", help="answers (%(default)s)")
    parser.add_argument("--prompt", type=output.positive, default=2048, metavar="N", help="its tokens (%(default)s)")
    parser.add_argument("--repeat", type=output.positive, default=3, metavar="N", help="arrivals; reports the median")
    up.add_engine_options(parser)
    output.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it; raises CommandError."""
    from headrace.bench.in_process import EngineBench

    variables = up.variables_of(arguments)
    bench_engine.prepare(variables)
    profiles = ("interactive", "throughput")
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in profiles}
    with output.progress() as show:
        with bench_engine.loading():
            show("loading the engines", None)
            variables = {**os.environ, **variables, **gaps.ONE_TOKEN_A_STEP}
            benches = {name: EngineBench({**variables, "HEADRACE_ENGINE_PROFILE": name}) for name in profiles}
        for number in range(arguments.repeat):
            for name, bench in benches.items():
                show(f"{name}, {number + 1} of {arguments.repeat}", number / arguments.repeat)
                measured[name].append(gaps.measure(bench, arguments.streams, arguments.prompt, number))
    report = {"streams": arguments.streams, "prompt_tokens": arguments.prompt, "profiles": measured}
    output.stdout(json_target=arguments.json).print(table(report))
    output.write_json(arguments.json, report)
    return output.OK


def table(report: dict[str, Any]) -> Table:
    """The report for people: medians of each profile."""
    title = f"{report['streams']} streams, a prompt of {report['prompt_tokens']} tokens arrives"
    drawn = Table(title=title, title_justify="left", box=None, pad_edge=False)
    drawn.add_column("profile")
    for name in COLUMNS:
        drawn.add_column(name.replace("_", " "), justify="right")
    for profile, runs in report["profiles"].items():
        rows = [
            (r["steady_ms"], r["gap_ms"]["p50"], r["gap_ms"]["p99"], r["p99_to_steady"], r["first_token_ms"])
            for r in runs
        ]
        drawn.add_row(profile, *(f"{statistics.median(column):.1f}" for column in zip(*rows, strict=True)))
    return drawn
