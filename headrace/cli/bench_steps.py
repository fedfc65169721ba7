"""`headrace bench steps`: what a decode step costs beside the model."""

from __future__ import annotations

import argparse
import os
from typing import Any

from rich.table import Table

from headrace.bench import gaps, steps
from headrace.cli import bench_engine, output, up

ROWS = (1, 16, 32)
COLUMNS = ("step_ms", "model_ms", "sampler_ms", "host_ms")


def add_parser(kinds: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "steps",
        help="what a decode step costs beside the model",
        description="Runs the engine in process with --rows answers that decode, in each way of sampling by turns, and "
        "reports medians of a step's time, of its time inside the model's operators, of choosing tokens, and the host "
        "overhead: the step less the model, that is scheduling, plan, choosing tokens, bookkeeping and outputs. What "
        "the engine's process does around its steps (commands, gRPC) is not in it. On a CPU alone.",
        epilog=output.EXIT_CODES,
    )
    parser.add_argument(
        "--rows", type=output.positive, nargs="+", default=ROWS, metavar="N", help="answers at once (1 16 32)"
    )
    parser.add_argument(
        "--sampling",
        choices=tuple(steps.SAMPLINGS),
        nargs="+",
        default=tuple(steps.SAMPLINGS),
        metavar="WAY",
        help=f"of {', '.join(steps.SAMPLINGS)} (all)",
    )
    parser.add_argument("--steps", type=output.positive, default=40, metavar="N", help="of a turn (%(default)s)")
    parser.add_argument("--repeat", type=output.positive, default=3, metavar="N", help="turns of each (%(default)s)")
    up.add_engine_options(parser)
    output.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it; raises CommandError."""
    from headrace.bench.in_process import EngineBench

    variables = {**up.variables_of(arguments), **gaps.ONE_TOKEN_A_STEP}
    bench_engine.prepare(variables)
    turns = [(rows, way) for rows in arguments.rows for way in arguments.sampling] * arguments.repeat
    found: dict[tuple[int, str], list[tuple[int, int, int]]] = {}
    with output.progress() as show:
        with bench_engine.loading():
            show("loading the engine", None)
            bench = EngineBench({**os.environ, **variables, "HEADRACE_ENGINE_DEVICE": "cpu"})
        most = bench.engine.config.max_num_seqs
        if max(arguments.rows) > most:
            raise output.CommandError(
                f"--rows is {max(arguments.rows)}; the engine takes {most} (HEADRACE_ENGINE_MAX_NUM_SEQS)",
                output.BAD_USAGE,
            )
        clock = steps.StepClock(bench)
        for number, (rows, way) in enumerate(turns):
            show(f"{rows} rows, {way}", number / len(turns))
            found.setdefault((rows, way), []).extend(clock.measure(rows, way, arguments.steps))
    report = {"settings": variables, "steps": [steps.summary(*key, measured) for key, measured in found.items()]}
    output.stdout(json_target=arguments.json).print(table(report))
    output.write_json(arguments.json, report)
    return output.OK


def table(report: dict[str, Any]) -> Table:
    """The report for people: medians, and the host's 95th percentile."""
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("rows", justify="right")
    drawn.add_column("sampling")
    for name in (*(name.replace("_", " ") for name in COLUMNS), "host ms p95"):
        drawn.add_column(name, justify="right")
    for line in report["steps"]:
        numbers = [*(line[name]["p50"] for name in COLUMNS), line["host_ms"]["p95"]]
        drawn.add_row(str(line["rows"]), line["sampling"], *(f"{number:.3f}" for number in numbers))
    return drawn
