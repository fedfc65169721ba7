"""`headrace trace`: draws where the time of answers went, from remembered receipts, Jaeger, or a file of spans."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.cli import jaeger, otlp_file, output, perfetto, receipts, stages, trace_page, waterfall
from headrace.cli.traces import GENERATE, OWN_TRACES, Trace, TraceSpan, by_trace
from headrace.v1 import timings_pb2

DEFAULT_JAEGER = "http://127.0.0.1:16686"


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "trace",
        help="draw where the time of an answer went",
        description="Draws a waterfall. Without --jaeger, a remembered receipt (by trace or request id) is enough; a "
        "trace that is not remembered here is fetched from Jaeger, with --jaeger every one is. FILE is a receipt, or "
        "spans as a collector writes them (OTLP in JSON).",
        epilog=output.EXIT_CODES,
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("id", nargs="?", metavar="ID|FILE", help="a trace id, a request id, or a file")
    which.add_argument("--last", action="store_true", help="the last answer that was asked for here")
    which.add_argument(
        "--slowest",
        type=output.positive,
        metavar="N",
        help="the N slowest answers remembered here, or with --jaeger those of the last day",
    )
    parser.add_argument("--jaeger", metavar="URL", help=f"query API of Jaeger ({DEFAULT_JAEGER})")
    parser.add_argument("--html", metavar="FILE", help="also write a page that opens anywhere, offline")
    parser.add_argument(
        "--perfetto",
        metavar="FILE",
        help="also write a Chrome trace for ui.perfetto.dev, in which the requests of an engine share one timeline",
    )
    parser.add_argument("--width", type=output.positive, metavar="CELLS", help="width (default: the terminal's)")
    output.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it; raises CommandError."""
    console = output.stdout(json_target=arguments.json)
    with _one_sentence():
        found = _find(arguments)
    traces = found.traces
    for trace in traces:
        for line in (trace.title, *trace.warnings, *waterfall.render(trace.bars(), arguments.width or console.width)):
            console.print(output.printable(line), soft_wrap=True)
    if arguments.html:
        page = trace_page.render(traces, traces[0].title if len(traces) == 1 else f"{len(traces)} traces")
        _write("--html", arguments.html, page)
    if arguments.perfetto:
        with _one_sentence():
            document = perfetto.chrome_trace(found.with_neighbours())
        _write("--perfetto", arguments.perfetto, json.dumps(document, separators=(",", ":"), default=str))
    report = [{"title": trace.title, "spans": [asdict(bar) for bar in trace.bars()]} for trace in traces]
    output.write_json(arguments.json, report[0] if len(report) == 1 else report)
    return output.OK


@contextmanager
def _one_sentence() -> Iterator[None]:
    """What cannot be found or read ends the command with one line and code 2."""
    try:
        yield
    except (receipts.ReceiptError, jaeger.JaegerError, otlp_file.OtlpError) as error:
        raise output.CommandError(str(error), output.BAD_USAGE) from error


@dataclass(frozen=True)
class _Found:
    """What was asked for, and how to get what else ran at the same time."""

    traces: list[Trace]
    neighbours: Callable[[], Iterable[TraceSpan]] = tuple

    def spans(self) -> list[TraceSpan]:
        return [span for trace in self.traces for span in trace.spans]

    def with_neighbours(self) -> list[TraceSpan]:
        mine = self.spans()
        seen = {(span.trace_id, span.span_id) for span in mine}
        others = {(s.trace_id, s.span_id): s for s in self.neighbours() if (s.trace_id, s.span_id) not in seen}
        return [*mine, *others.values()]


def _find(arguments: argparse.Namespace) -> _Found:
    if arguments.slowest:
        if arguments.jaeger:
            return _of_jaeger(arguments.jaeger, jaeger.slowest(arguments.jaeger, arguments.slowest))
        return _Found([_of_receipt(receipt) for receipt in receipts.slowest(arguments.slowest)])
    receipt = None
    if arguments.last:
        receipt = receipts.last()
    elif Path(arguments.id).is_file():
        file = Path(arguments.id)
        if otlp_file.looks_like(file):
            return _of_file(file)
        receipt = receipts.load(file)
    elif not arguments.jaeger:
        receipt = receipts.find(arguments.id)
    if receipt is not None and not arguments.jaeger:
        return _Found([_of_receipt(receipt)])
    wanted, base_url = receipt.trace_id if receipt is not None else arguments.id, arguments.jaeger or DEFAULT_JAEGER
    return _of_jaeger(base_url, [jaeger.fetch(base_url, wanted)])


def _of_jaeger(base_url: str, found: Sequence[list[TraceSpan]]) -> _Found:
    traces = [Trace.of(f"trace {spans[0].trace_id}", spans) for spans in found]
    everything = [span for spans in found for span in spans]
    return _Found(traces, lambda: jaeger.around(base_url, everything))


def _of_file(file: Path) -> _Found:
    """The requests in a file of spans; steps and batches are neighbours."""
    spans = otlp_file.load(file)
    found = [of_one for of_one in by_trace(spans).values() if any(span.name not in OWN_TRACES for span in of_one)]
    requests = [of_one for of_one in found if any(GENERATE in span.name for span in of_one)]
    traces = [Trace.of(f"trace {of_one[0].trace_id}", of_one) for of_one in requests or found]
    if not traces:
        raise otlp_file.OtlpError(f"{file} holds no spans of requests")
    return _Found(traces, lambda: spans)


def _of_receipt(receipt: receipts.Receipt) -> Trace:
    title = f"receipt of trace {receipt.trace_id} ({receipt.model}, {receipt.asked_at})"
    bars = bars_of(receipt.timings)
    spans = [
        TraceSpan(receipt.trace_id, f"stage-{number}", "", bar.name, "", bar.start_ns, bar.duration_ns)
        for number, bar in enumerate(bars)
    ]
    return Trace(title, tuple(spans), tuple(bar.depth for bar in bars))


def bars_of(timings: timings_pb2.StageTimings) -> list[waterfall.Bar]:
    """The stages of a receipt, one after the other, under the whole."""
    bars = [waterfall.Bar("request", 0, timings.total_ns)]
    first = timings.time_to_first_token_ns
    bars.append(waterfall.Bar("time to first token", 0, first, 1))
    start = 0
    for stage in stages.first_token_stages(timings):
        bars.append(waterfall.Bar(stage.name, start, stage.duration_ns, 2))
        start += stage.duration_ns
    decoded = first + timings.decode_ns
    bars.append(waterfall.Bar("decode", first, timings.decode_ns, 1))
    if timings.decode_delivery_ns > 0:
        bars.append(waterfall.Bar("decode_delivery", decoded, timings.decode_delivery_ns, 1))
    bars.append(waterfall.Bar("tail", decoded + timings.decode_delivery_ns, timings.tail_ns, 1))
    return bars


def _write(option: str, target: str, text: str) -> None:
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise output.CommandError(
            f"{option} {target}: cannot be written ({error.strerror})", output.BAD_USAGE
        ) from error
