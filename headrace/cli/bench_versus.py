"""`headrace bench offline --vs PEER`: another engine beside ours, by turns."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rich.table import Table

from headrace.bench.peers import contestants, figures, install, versus
from headrace.bench.statistics import FEWEST_PAIRS
from headrace.cli import output, pipeline, up

ENGINE = "engine"  # our own, in process: what a pipeline is compared with


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the comparison."""
    group = parser.add_argument_group("beside another engine")
    group.add_argument(
        "--vs",
        choices=(*contestants.PEERS, ENGINE),
        metavar="PEER",
        help=f"measure by turns with {', '.join(contestants.PEERS)}, or with our engine in process: {ENGINE}",
    )
    group.add_argument(
        "--figure",
        choices=(*figures.FIGURES, *figures.ATTENTION),
        nargs="+",
        metavar="NAME",
        help=f"{', '.join((*figures.FIGURES, *figures.ATTENTION))} (default: all that the peer can be measured by)",
    )
    group.add_argument("--pairs", type=output.positive, default=FEWEST_PAIRS, metavar="N", help="(%(default)s)")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report. Raises CommandError, RunFailed, ProgramDied, TimeoutError."""
    wanted = _figures(arguments)
    variables = up.variables_of(arguments)
    threads = int(variables.setdefault("HEADRACE_ENGINE_THREADS", str(os.cpu_count() or 1)))
    rows: list[versus.Row] = []
    with ExitStack() as stack, output.progress() as show:
        peer = _peer(stack, arguments.vs, variables, threads)
        show("loading our engine", None)
        ours = _ours(stack, arguments, variables, threads)
        report = {"ours": ours.title, "peer": peer.title, "settings": variables, "pairs": arguments.pairs}
        for row in versus.compare(ours, peer, wanted, arguments.pairs, show):
            rows.append(row)
            # After each figure: if a later one fails, or somebody has enough, this one is there.
            output.write_json(arguments.json, {**report, "rows": [one.as_json() for one in rows]})
    return {**report, "rows": [one.as_json() for one in rows]}


def table(report: dict[str, Any]) -> Table:
    """The report for people."""
    drawn = Table(
        title=f"{report['ours']} by {report['peer']}, {report['pairs']} pairs",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for heading in ("", "ours", "peer", "unit", "ours / peer", "95 %"):
        drawn.add_column(heading, justify="left" if heading in ("", "unit") else "right")
    for row in report["rows"]:
        value, ratio = figures.VALUES[row["value"]], row["ratio"]
        ours, peer = row["ours"]["median"], row["peer"]["median"]
        spread = f"{ratio['low']:.2f} - {ratio['high']:.2f}"
        drawn.add_row(value.title, f"{ours:.4g}", f"{peer:.4g}", value.unit, f"{ratio['value']:.3f}", spread)
    return drawn


def _figures(arguments: argparse.Namespace) -> Sequence[str]:
    """What is measured. Raises CommandError."""
    peer = contestants.PEERS.get(arguments.vs)
    known = tuple(figures.FIGURES) if peer is None else peer.figures
    needs_pipeline = peer is None or peer.pipeline
    if needs_pipeline and not arguments.pipeline and not arguments.target:
        raise output.CommandError(f"--vs {arguments.vs} goes with --pipeline or --target", output.BAD_USAGE)
    unknown = [name for name in arguments.figure or () if name not in known]
    if unknown:
        raise output.CommandError(
            f"--figure {unknown[0]}: {arguments.vs} can be measured by {', '.join(known)}", output.BAD_USAGE
        )
    return arguments.figure or known


def _peer(stack: ExitStack, name: str, variables: dict[str, str], threads: int) -> contestants.Contestant:
    if name == ENGINE:
        return contestants.engine(stack, variables)
    try:
        return contestants.PEERS[name].make(stack, threads)
    except install.NotInstalled as error:
        raise output.CommandError(str(error), output.BAD_USAGE) from error


def _ours(
    stack: ExitStack, arguments: argparse.Namespace, variables: dict[str, str], threads: int
) -> contestants.Contestant:
    pipeline.services_root()
    peer = contestants.PEERS.get(arguments.vs)  # none: it is our engine
    if peer is not None and peer.ours is not None:
        return peer.ours(stack, threads)
    target = stack.enter_context(_pipeline(variables)) if arguments.pipeline else arguments.target
    if target:
        return contestants.clients(stack, target, text=peer is not None and peer.pipeline)
    up.ensure_model(variables.get("HEADRACE_MODEL") or os.environ.get("HEADRACE_MODEL"))
    return contestants.engine(stack, variables)


@contextmanager
def _pipeline(variables: dict[str, str]) -> Iterator[str]:
    """A pipeline's gateway."""
    options = pipeline.PipelineOptions(variables, ports=dict.fromkeys(pipeline.PORTS, 0))
    up.prepare(options)
    with pipeline.running(options) as (planned, _):
        yield planned.target
