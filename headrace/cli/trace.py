"""`headrace trace`: draws the waterfall of a remembered receipt, or of a trace that Jaeger has."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.cli import jaeger, output, receipts, stages, waterfall
from headrace.v1 import timings_pb2

DEFAULT_JAEGER = "http://127.0.0.1:16686"


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "trace",
        help="draw where the time of an answer went",
        description="Draws a waterfall. Without --jaeger, a remembered receipt (by trace or request id) is enough; a "
        "trace that is not remembered here is fetched from Jaeger, with --jaeger every one is.",
        epilog=output.EXIT_CODES,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("id", nargs="?", metavar="ID|FILE", help="a trace id, a request id, or a receipt in a file")
    which.add_argument("--last", action="store_true", help="the last answer that was asked for here")
    parser.add_argument("--jaeger", metavar="URL", help=f"query API of Jaeger ({DEFAULT_JAEGER})")
    parser.add_argument("--width", type=output.positive, metavar="CELLS", help="width (default: the terminal's)")
    output.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it; raises CommandError."""
    console = output.stdout(json_target=arguments.json)
    try:
        title, bars = _find(arguments)
    except (receipts.ReceiptError, jaeger.JaegerError) as error:
        raise output.CommandError(str(error), output.BAD_USAGE) from error
    lines = [title, *waterfall.render(bars, arguments.width or console.width)]
    for line in lines:
        console.print(output.printable(line), soft_wrap=True)
    output.write_json(arguments.json, {"title": title, "spans": [asdict(bar) for bar in bars]})
    return output.OK


def _find(arguments: argparse.Namespace) -> tuple[str, list[waterfall.Bar]]:
    receipt = None
    if arguments.last:
        receipt = receipts.last()
    elif Path(arguments.id).is_file():
        receipt = receipts.load(Path(arguments.id))
    elif not arguments.jaeger:
        receipt = receipts.find(arguments.id)
    if receipt is not None and not arguments.jaeger:
        return f"receipt of trace {receipt.trace_id} ({receipt.model}, {receipt.asked_at})", bars_of(receipt.timings)
    trace_id = receipt.trace_id if receipt is not None else arguments.id
    return f"trace {trace_id}", jaeger.fetch(arguments.jaeger or DEFAULT_JAEGER, trace_id)


def bars_of(timings: timings_pb2.StageTimings) -> list[waterfall.Bar]:
    """The stages of a receipt, one after the other, under the whole."""
    bars = [waterfall.Bar("request", 0, timings.total_ns)]
    first = timings.time_to_first_token_ns
    bars.append(waterfall.Bar("time to first token", 0, first, 1))
    start = 0
    for stage in stages.first_token_stages(timings):
        bars.append(waterfall.Bar(stage.name, start, stage.duration_ns, 2))
        start += stage.duration_ns
    bars.append(waterfall.Bar("decode", first, timings.decode_ns, 1))
    bars.append(waterfall.Bar("tail", first + timings.decode_ns, timings.tail_ns, 1))
    return bars
