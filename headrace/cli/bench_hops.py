"""`headrace bench hops`: what each token costs in gateway, stream process and engine edge."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from rich.table import Table

from headrace.bench import hops, null_engine
from headrace.bench.results import RunFailed
from headrace.cli import output, pipeline, up
from headrace.cli.supervisor import ProgramDied

COALESCE = (1, 4, 8)
# A message leaves when it is full and not before, so that what is measured is what was asked for.
_COALESCE_MS = "10000"


def add_parser(kinds: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "hops",
        help="CPU microseconds a token between engine and client",
        description="Starts a pipeline whose engine computes nothing and hands out made-up tokens at a steady rate, "
        "reads from it with as many clients as --streams says, and reports the CPU time of gateway, stream process "
        "and engine process for each token that the clients were given. Needs Linux.",
        epilog=output.EXIT_CODES,
    )
    parser.add_argument(
        "--coalesce", type=output.positive, nargs="+", default=COALESCE, metavar="N", help="tokens a message (1 4 8)"
    )
    parser.add_argument(
        "--streams", type=output.positive, default=32, metavar="N", help="answers at once (%(default)s)"
    )
    parser.add_argument(
        "--rate", type=output.positive, default=1000, metavar="N", help="tokens a second, all streams (%(default)s)"
    )
    parser.add_argument("--kind", choices=tuple(hops.KINDS), default="stream", help="of stream (default: %(default)s)")
    parser.add_argument("--seconds", type=output.seconds, default=10.0, help="of one measured window (%(default)s)")
    parser.add_argument("--repeat", type=output.positive, default=3, metavar="N", help="windows; reports the median")
    output.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it; raises CommandError."""
    if sys.platform != "linux":
        raise output.CommandError("the CPU time of other processes can be read on Linux alone")
    try:
        with output.progress() as show:
            measured = []
            for number, coalesce in enumerate(arguments.coalesce):
                show(f"{coalesce} tokens a message", number / len(arguments.coalesce))
                measured.append(hops.report(_measure(arguments, coalesce), coalesce))
    except RunFailed as error:
        raise output.CommandError(str(error)) from error
    except (ProgramDied, TimeoutError) as error:
        raise output.CommandError(f"the pipeline: {error}") from error
    report = {"streams": arguments.streams, "kind": arguments.kind, "rate": arguments.rate, "runs": measured}
    output.stdout(json_target=arguments.json).print(table(report))
    output.write_json(arguments.json, report)
    return output.OK


def table(report: dict[str, Any]) -> Table:
    """The report for people: a line for each number of tokens a message."""
    title = f"CPU µs a token, {report['streams']} streams ({report['kind']})"
    drawn = Table(title=title, title_justify="left", box=None, pad_edge=False)
    drawn.add_column("tokens a message", justify="right")
    for name in hops.PROCESSES:
        drawn.add_column(name, justify="right")
    drawn.add_column("total", justify="right", style="bold")
    drawn.add_column("tok/s", justify="right", style="dim")
    for one in report["runs"]:
        costs = [f"{one['us_a_token'][name]:.1f}" for name in (*hops.PROCESSES, "total")]
        drawn.add_row(f"{one['tokens_a_message']:.2f}", *costs, f"{one['tokens_per_s']:.0f}")
    return drawn


def _measure(arguments: argparse.Namespace, coalesce: int) -> list[hops.Pass]:
    options = pipeline.PipelineOptions(
        variables={
            "HEADRACE_STREAM_COALESCE_TOKENS": str(coalesce),
            "HEADRACE_STREAM_COALESCE_MS": _COALESCE_MS,
            null_engine.TOKENS_PER_S_VARIABLE: str(arguments.rate),
        },
        ports=dict.fromkeys(pipeline.PORTS, 0),
        modules={"engine": "headrace.bench.null_engine"},
    )
    up.prepare(options)
    with pipeline.running(options) as (planned, supervisor):
        pids = {name: supervisor.pids[name] for name in hops.PROCESSES}
        return asyncio.run(
            hops.measure(
                planned.target,
                pids,
                streams=arguments.streams,
                seconds=arguments.seconds,
                repeat=arguments.repeat,
                kind=arguments.kind,
            )
        )
