"""`headrace bench run`: a load through the pipeline, and the verdict, the figures and where the time went."""

from __future__ import annotations

import argparse
import contextlib
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.results import RunFailed
from headrace.cli import bench_load, output
from headrace.cli.supervisor import ProgramDied
from headrace.cli.trace_page import fill
from headrace.v1 import generation_pb2

if TYPE_CHECKING:
    from headrace.bench.load.spec import LoadSpec
    from headrace.bench.records import Record

_CSV = (
    *("conversation", "turn", "leg", "client", "priority", "tenant", "slow_reader", "outcome"),
    *("intended_s", "sent_s", "first_s", "last_s", "ended_s"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "request_id", "trace_id"),
)


def add_parser(kinds: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "run",
        help="a load: open or closed loop, from several processes, judged before it is reported",
        description="Makes a load, waits until it is steady, and reports latencies from when each request was due. An "
        "INVALID run (the tool was late, too few requests, not steady) says why and concludes nothing. Runs are kept.",
        epilog=output.EXIT_CODES + "; an invalid run: 1",
    )
    level = parser.add_mutually_exclusive_group(required=True)
    level.add_argument(
        "--rate",
        type=output.positive_number,
        nargs="+",
        metavar="R",
        help="open loop: requests a second; several: a ramp",
    )
    level.add_argument("--concurrency", type=output.positive, nargs="+", metavar="N", help="closed loop: at a time")
    level.add_argument(
        "--replay", metavar="FILE", help="open loop: times and lengths of a log (JSONL, Azure, BurstGPT)"
    )
    parser.add_argument("--speed", type=output.positive_number, metavar="X", help="of the replay (1)")
    parser.add_argument(
        "--duration", type=output.seconds, metavar="SECONDS", help="of each leg (30), or of the replay (all of the log)"
    )
    parser.add_argument(
        "--requests",
        type=output.positive,
        metavar="N",
        help="of each leg, in the place of a duration, or of the replay",
    )
    bench_load.add_load_options(parser)
    bench_load.add_measuring_options(parser)
    files = parser.add_argument_group("what is written")
    output.add_json_option(files)
    files.add_argument("--csv", type=Path, metavar="FILE", help="a line a request")
    files.add_argument("--records", type=Path, metavar="FILE", help="JSON lines: each request with times and receipt")
    files.add_argument("--html", type=Path, metavar="FILE", help="a page with charts that opens offline")
    intent = parser.add_argument_group("intent, kept with the run")
    intent.add_argument("--change", default="", metavar="TEXT", help="what is different from the run before")
    intent.add_argument("--expect", default="", metavar="TEXT", help="what that should do")
    intent.add_argument("--side-effects", default="", metavar="TEXT", help="what else it could do")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it; raises CommandError."""
    bench_load.needs_numpy()
    from headrace.bench import archive, execute

    for option in ("json", "csv", "records", "html"):
        output.expect_writable(f"--{option}", getattr(arguments, option))
    spec = spec_of(arguments)
    measuring = bench_load.measuring_of(arguments)
    intent = archive.Intent(arguments.change, arguments.expect, arguments.side_effects)
    try:
        with output.progress() as show:
            show("starting", None)
            with bench_load.server(arguments) as server:
                report, records = execute.run(spec, server, measuring, _progress(show, spec))
        report = archive.save(arguments.archive or archive.directory(), report, records, intent)
    except (RunFailed, archive.ArchiveError) as error:
        raise output.CommandError(str(error)) from error
    except (ProgramDied, TimeoutError) as error:
        raise output.CommandError(f"the pipeline: {error}") from error
    _remember(report, records)
    show_report(arguments, report)
    _write(arguments, report, records)
    return output.FAILED if report["problems"] else output.OK


def spec_of(arguments: argparse.Namespace) -> LoadSpec:
    """The load. Raises CommandError."""
    from headrace.bench.load.spec import Leg

    if arguments.replay:
        leg = Leg(0.0, arguments.duration, arguments.requests)
        return bench_load.spec_of(arguments, "open", (leg,), arguments.replay)
    if arguments.speed:
        raise output.CommandError("--speed goes with --replay", output.BAD_USAGE)
    levels = arguments.rate or arguments.concurrency
    seconds = arguments.duration or (None if arguments.requests else bench_load.DEFAULT_SECONDS)
    legs = tuple(Leg(float(level), seconds, arguments.requests) for level in levels)
    return bench_load.spec_of(arguments, "open" if arguments.rate else "closed", legs)


def show_report(arguments: argparse.Namespace, report: Mapping[str, Any]) -> None:
    """Prints the verdict and, where the run is valid, its figures."""
    from headrace.bench import tables

    console = output.stdout(json_target=arguments.json)
    console.print(f"{report['verdict']}  run {report['id']}", style="bold", soft_wrap=True)
    console.print(f"{bench_load.load_text(report['load'])}, seed {report['load']['seed']}", soft_wrap=True)
    for problem in report["problems"]:
        console.print(f"  {problem}", soft_wrap=True)
    if report["problems"]:
        console.print(
            "no figures are concluded from an invalid run; --json, --records and --html have what was seen",
            soft_wrap=True,
        )
    console.print()
    tables.print_tables(console, tables.of_invalid_run(report) if report["problems"] else tables.of_run(report))


def page(report: Mapping[str, Any], records: Sequence[Record]) -> str:
    """The report as a page."""
    from headrace.bench import charts, tables

    part = report["fingerprint"]
    machine = f"{part['hardware']['cores']} cores of {part['hardware']['processor']}"
    made = f"{report['started_at']}, {', '.join(part['model'])} on {machine}, code {part['versions']['code']}"
    shown = tables.of_invalid_run(report) if report["problems"] else tables.of_run(report)
    return fill(
        "bench.html",
        {
            "title": f"Run {report['id']}",
            "about": f"{bench_load.load_text(report['load'])}; {made}",
            "verdict": report["verdict"],
            "problems": report["problems"],
            "tables": [rows.as_json() for rows in shown],
            "charts": charts.of_run(report, records),
        },
    )


def _remember(report: Mapping[str, Any], records: Sequence[Record]) -> None:
    """Keeps the receipts of the slowest requests, so that `headrace trace` draws them by the ids in the report."""
    from headrace.cli.receipts import Receipt, remember
    from headrace.cli.stages import from_json

    wanted = {one["trace_id"] for leg in report["legs"] for one in leg["where"]["slowest"]}
    slowest = sorted((one for one in records if one.trace_id in wanted), key=lambda record: record.ttft_s)
    for record in slowest:  # the slowest last: it is what `headrace trace --last` draws
        usage = generation_pb2.Usage(
            prompt_token_count=record.prompt_tokens,
            cached_token_count=record.cached_tokens,
            completion_token_count=record.output_tokens,
        )
        wall_ns = round((record.ended_s - record.sent_s) * 1e9)
        model = next(iter(report["fingerprint"]["model"]), "")
        ids = record.trace_id, record.request_id
        with contextlib.suppress(OSError):
            remember(Receipt(*ids, model, report["started_at"], wall_ns, usage, from_json(record.receipt)))


def _progress(show: Any, spec: LoadSpec) -> Any:
    """Shows requests and tokens so far, and the share done where the number of requests is known."""
    wanted = sum(leg.requests or 0 for leg in spec.legs) * spec.turns
    if spec.loop == "open":
        wanted = sum(1 for _ in spec.due()) * spec.turns

    live = output.stderr().is_terminal  # a log gets one line

    def progress(requests: int, tokens: int) -> None:
        text = f"{requests} requests, {tokens} tokens" if live else "the load runs"
        show(text, requests / wanted if wanted else None)

    return progress


def _write(arguments: argparse.Namespace, report: Mapping[str, Any], records: Sequence[Record]) -> None:
    from headrace.bench.records import write

    output.write_json(arguments.json, report)
    try:
        if arguments.csv:
            with arguments.csv.open("w", encoding="utf-8", newline="") as file:
                lines = csv.writer(file)
                lines.writerow(_CSV)
                lines.writerows([getattr(record, name) for name in _CSV] for record in records)
        if arguments.records:
            write(arguments.records, records)
        if arguments.html:
            arguments.html.write_text(page(report, records), encoding="utf-8")
    except OSError as error:
        raise output.CommandError(
            f"{error.filename}: cannot be written ({error.strerror})", output.BAD_USAGE
        ) from error
