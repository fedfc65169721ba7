"""`headrace bench`; of it `offline`: a fixed workload through the engine alone, or through a whole pipeline."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
from collections.abc import Callable
from typing import Any

from rich.table import Table

from headrace.bench import results, workloads
from headrace.cli import (
    bench_accuracy,
    bench_compare,
    bench_engine,
    bench_gaps,
    bench_hops,
    bench_run,
    bench_steps,
    bench_sweep,
    bench_versus,
    output,
    pipeline,
    up,
)
from headrace.cli.supervisor import ProgramDied

MODES = {"engine": "engine in process", "pipeline": "through the pipeline"}

CACHES = ("kept", "reset", "off")


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser("bench", help="measure")
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="KIND")
    offline: argparse.ArgumentParser = kinds.add_parser(
        "offline",
        help="a fixed workload as fast as it goes",
        description="Generates a fixed workload greedily, token ids in, end-of-sequence ignored, and reports output "
        "tokens a second. In process: the engine alone. Through a pipeline: as many clients as --concurrency says, "
        "each with its own connection, streaming.",
        epilog=output.EXIT_CODES,
    )
    offline.add_argument("--workload", choices=workloads.NAMES, default="w1", help="(default: %(default)s)")
    where = offline.add_mutually_exclusive_group()
    where.add_argument("--engine-in-process", action="store_true", help="the engine alone, in this process (default)")
    where.add_argument("--pipeline", action="store_true", help="start a pipeline on free ports and go through it")
    where.add_argument("--target", metavar="HOST:PORT", help="go through the pipeline whose gateway is there")
    offline.add_argument("--concurrency", type=output.positive, default=32, metavar="N", help="clients (%(default)s)")
    offline.add_argument("--repeat", type=output.positive, default=1, metavar="N", help="passes; reports the median")
    offline.add_argument(
        "--prefix-cache",
        choices=CACHES,
        nargs="+",
        default=["kept"],
        metavar="MODE",
        help="in process: kept, reset before each turn, or off (kept); several take turns in each pass",
    )
    bench_versus.add_options(offline)
    up.add_engine_options(offline)
    output.add_json_option(offline)
    offline.set_defaults(run=run)
    bench_hops.add_parser(kinds)
    bench_gaps.add_parser(kinds)
    bench_steps.add_parser(kinds)
    bench_accuracy.add_parser(kinds)
    bench_run.add_parser(kinds)
    bench_sweep.add_parser(kinds)
    bench_compare.add_parsers(kinds)


def run(arguments: argparse.Namespace) -> int:
    """Runs it; raises CommandError."""
    try:
        report = bench_versus.measure(arguments) if arguments.vs else measure(arguments)
    except results.RunFailed as error:
        raise output.CommandError(str(error)) from error
    except (ProgramDied, TimeoutError) as error:
        raise output.CommandError(f"the pipeline: {error}") from error
    output.stdout(json_target=arguments.json).print(bench_versus.table(report) if arguments.vs else table(report))
    output.write_json(arguments.json, report)
    return output.OK


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report. Raises CommandError, RunFailed, ProgramDied, TimeoutError."""
    if arguments.figure:
        raise output.CommandError("--figure goes with --vs", output.BAD_USAGE)
    if arguments.prefix_cache != ["kept"] and (arguments.target or arguments.pipeline):
        raise output.CommandError("--prefix-cache is for the engine in process", output.BAD_USAGE)
    variables = up.variables_of(arguments)
    settings = {"concurrency": arguments.concurrency, "settings": variables}
    if arguments.target:
        return _through(arguments, arguments.target, **settings)
    if arguments.pipeline:
        options = pipeline.PipelineOptions(variables, ports=dict.fromkeys(pipeline.PORTS, 0))
        up.prepare(options)
        with pipeline.running(options) as (planned, _):
            return _through(arguments, planned.target, **settings)
    return _in_process(arguments, variables, settings=variables)


def table(report: dict[str, Any]) -> Table:
    """The report for people."""
    drawn = Table(
        title=f"{report['workload']}, {MODES[report['mode']]}", title_justify="left", box=None, pad_edge=False
    )
    drawn.add_column("")
    drawn.add_column("", justify="right")
    passes = f" (median of {len(report['runs'])})" if len(report["runs"]) > 1 else ""
    drawn.add_row(f"output tok/s{passes}", f"{report['output_tokens_per_s']:.1f}", style="bold")
    drawn.add_row("seconds", f"{report['seconds']:.2f}")
    drawn.add_row("prompt tokens", str(report["prompt_tokens"]))
    drawn.add_row("of them cached", str(report["cached_tokens"]))
    drawn.add_row("output tokens", str(report["output_tokens"]))
    for key, label in (("ttft_s", "first token"), ("tpot_s", "a token after it")):
        drawn.add_row(f"{label}, median", f"{report[key]['p50'] * 1e3:.1f} ms")
        drawn.add_row(f"{label}, p95", f"{report[key]['p95'] * 1e3:.1f} ms")
    for name, one in report.get("prefix_cache", {}).items():
        numbers = f"{one['seconds']:.2f} s, {one['ratio']:.3f}, {one['cpu_ratio']:.3f}"
        drawn.add_row(f"cache {name}: time, ratio, of CPU time", numbers)
    return drawn


def _through(arguments: argparse.Namespace, target: str, **more: Any) -> dict[str, Any]:
    from headrace.bench import through

    def one_pass(workload: workloads.Workload, tick: Callable[[int], None]) -> results.Run:
        return asyncio.run(through.run(target, workload, arguments.concurrency, tick))

    return _passes(arguments, "pipeline", one_pass, **more)


def _in_process(arguments: argparse.Namespace, variables: dict[str, str], **more: Any) -> dict[str, Any]:
    from headrace.bench.in_process import EngineBench

    bench_engine.prepare(variables)
    with bench_engine.loading(), output.progress() as show:
        show("loading the engine", None)
        bench = EngineBench({**os.environ, **variables})
    runs: dict[str, list[results.Run]] = {name: [] for name in arguments.prefix_cache}
    turns = itertools.cycle(runs)

    def one_pass(workload: workloads.Workload, tick: Callable[[int], None]) -> results.Run:
        name = next(turns)
        runs[name].append(bench.run(workload, tick, prefix_cache=name))
        return runs[name][-1]

    report = _passes(arguments, "engine", one_pass, times=len(runs), **more)
    if len(runs) == 1:
        return report
    first = next(iter(runs.values()))
    return {
        **results.report(arguments.workload, "engine", first, **more),
        "prefix_cache": results.compared(runs),
        "all_runs": report["runs"],
    }


def _passes(
    arguments: argparse.Namespace,
    mode: str,
    one_pass: Callable[[workloads.Workload, Callable[[int], None]], results.Run],
    times: int = 1,
    **more: Any,
) -> dict[str, Any]:
    workload = workloads.get(arguments.workload)
    _, _, wanted = workloads.counts(workload)
    runs = []
    with output.progress() as show:
        for number in range(1, times * arguments.repeat + 1):
            text = f"{arguments.workload}, pass {number} of {times * arguments.repeat}"
            show(text, 0.0)
            runs.append(one_pass(workload, lambda tokens, text=text: show(text, tokens / wanted)))  # type: ignore[misc]
    return results.report(arguments.workload, mode, runs, **more)
