"""`headrace bench sweep`: the knee of a server, or what one setting does."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.results import RunFailed
from headrace.cli import bench_compare, bench_load, output
from headrace.cli.supervisor import ProgramDied
from headrace.cli.trace_page import fill

if TYPE_CHECKING:
    from headrace.bench.knee import Knee
    from headrace.bench.load.spec import LoadSpec
    from headrace.bench.sweep import KneeSweep


def add_parser(kinds: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "sweep",
        help="the knee by bisection, or one setting's values by turns",
        description="--knee finds the highest load at which 95 % of the requests keep their objectives, and recommends "
        "70 % of it. --vary compares the values of one setting with the first of them, A B B A, all servers up.",
        epilog=output.EXIT_CODES,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--knee", choices=("rate", "concurrency"), help="over what the load is raised")
    what.add_argument(
        "--vary",
        type=_setting,
        metavar="SETTING=VALUE,VALUE,...",
        help="max_num_seqs, max_num_batched_tokens, block_size, kv_memory_utilization, coalesce_tokens, or a HEADRACE_ "
        "variable",
    )
    knee = parser.add_argument_group("with --knee")
    knee.add_argument("--start", type=output.positive, default=4, metavar="N", help="first level (%(default)s)")
    knee.add_argument("--resolution", type=output.positive_number, default=0.1, metavar="SHARE", help="(%(default)s)")
    knee.add_argument("--repeats", type=output.positive, default=3, metavar="N", help="bisections; six hold 95 %% (3)")
    knee.add_argument("--html", type=Path, metavar="FILE", help="a page with the chart of the knee")
    vary = parser.add_argument_group("with --vary")
    level = vary.add_mutually_exclusive_group()
    level.add_argument("--rate", type=output.positive_number, metavar="R", help="open loop: requests a second")
    level.add_argument("--concurrency", type=output.positive, metavar="N", help="closed loop: at a time")
    vary.add_argument("--pairs", type=output.positive, default=8, metavar="N", help="of runs (%(default)s)")
    parser.add_argument("--requests", type=output.positive, default=150, metavar="N", help="of a run (%(default)s)")
    bench_load.add_load_options(parser)
    bench_load.add_measuring_options(parser)
    output.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it; raises CommandError."""
    bench_load.needs_numpy()
    from headrace.bench import archive, comparison, knee

    try:
        return _knee(arguments) if arguments.knee else _vary(arguments)
    except (RunFailed, knee.NoKnee, archive.ArchiveError) as error:
        raise output.CommandError(str(error)) from error
    except comparison.Refused as error:
        reasons = str(error).replace("\n", "; ")
        raise output.CommandError(f"not comparable: {reasons}") from error
    except (ProgramDied, TimeoutError) as error:
        raise output.CommandError(f"the pipeline: {error}") from error


def _knee(arguments: argparse.Namespace) -> int:
    from headrace.bench import execute
    from headrace.bench.sweep import KneeSweep

    spec = _spec(arguments, float(arguments.start), closed=arguments.knee == "concurrency")
    measuring = bench_load.measuring_of(arguments)
    with output.progress() as show, bench_load.server(arguments) as server:

        def one(*what: Any) -> Any:
            show(f"probe {len(sweep.probes) + 1}: {what[0].legs[0].level:.3g}", None)
            return execute.run(*what)

        sweep = KneeSweep(one, spec, server, measuring)
        found = sweep.find(arguments.start, resolution=arguments.resolution, repeats=arguments.repeats)
    report = _knee_report(arguments.knee, sweep, found)
    console = output.stdout(json_target=arguments.json)
    for line in knee_lines(report):
        console.print(line, soft_wrap=True)
    output.write_json(arguments.json, report)
    if arguments.html:
        try:
            arguments.html.write_text(page(report, spec.loop), encoding="utf-8")
        except OSError as error:
            raise output.CommandError(f"--html {arguments.html}: {error.strerror}", output.BAD_USAGE) from error
    return output.OK


def _knee_report(over: str, sweep: KneeSweep, found: Knee) -> dict[str, Any]:
    recommended = found.recommended
    return {
        "over": over,
        "slo_s": sweep.measuring.slo.as_json(),
        "knee": found.level.as_json(),
        "repetitions": list(found.found),
        "recommended": recommended,
        "recommended_concurrency": recommended if over == "concurrency" else sweep.in_flight(recommended),
        "probes": sweep.probes,
    }


def knee_lines(report: Mapping[str, Any]) -> list[str]:
    """What was found, for people."""
    knee, unit = report["knee"], "requests/s" if report["over"] == "rate" else "at a time"
    objectives = ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in report["slo_s"].items())
    certain = "95 % interval" if knee["count"] >= 6 else f"range of {knee['count']}, six hold 95 %"
    concurrency = max(1, int(report["recommended_concurrency"]))
    return [
        f"objectives: {objectives}",
        f"knee: {knee['value']:.3g} {unit}, {knee['low']:.3g} to {knee['high']:.3g} ({certain})",
        f"recommended, 70 % of it: {report['recommended']:.3g} {unit}; concurrency {concurrency}",
        *(
            f"  {one['level']:8.3g}  {'kept' if one['kept'] else 'lost'}  {one['figures']['slo_share']:6.1%} within, "
            f"{one['figures']['output_tokens_per_s']:.0f} tokens/s {'; '.join(one['problems'])}"
            for one in report["probes"]
        ),
    ]


def page(report: Mapping[str, Any], loop: str) -> str:
    """The page of a knee."""
    from headrace.bench import charts

    lines = knee_lines(report)
    chart = charts.knee([(one["level"], one["figures"]) for one in report["probes"]], loop)
    rows = [
        (f"{one['level']:.3g}", "kept" if one["kept"] else "lost", f"{one['figures']['slo_share']:.1%}",
         f"{one['figures']['output_tokens_per_s']:.1f}", f"{one['figures']['requests_per_s']:.2f}")
        for one in report["probes"]
    ]  # fmt: skip
    columns = ("level", "objectives", "within", "tokens/s", "requests/s")
    tables = [{"title": "probes", "columns": columns, "rows": rows, "text": False}]
    data = {"title": lines[1], "about": f"{lines[0]}; {lines[2]}", "verdict": "", "problems": [], "tables": tables}
    return fill("bench.html", {**data, "charts": [chart]})


def _vary(arguments: argparse.Namespace) -> int:
    from headrace.bench import archive, execute, sweep

    if arguments.target:
        raise output.CommandError("--vary starts its own servers; --target has one value", output.BAD_USAGE)
    name, values = arguments.vary
    setting = sweep.SETTINGS.get(name, name)
    if not setting.startswith("HEADRACE_"):
        known = ", ".join(sweep.SETTINGS)
        raise output.CommandError(f"--vary {name}: expected {known}, or a HEADRACE_ variable", output.BAD_USAGE)
    level = arguments.rate or float(arguments.concurrency or 8)
    spec = _spec(arguments, level, closed=not arguments.rate)
    measuring = bench_load.measuring_of(arguments)
    place = arguments.archive or archive.directory()
    with ExitStack() as stack:
        show = stack.enter_context(output.progress())
        servers = {value: stack.enter_context(bench_load.server(arguments, {setting: value})) for value in values}

        def one(*what: Any) -> Any:
            show(f"{setting}={what[1].configuration[setting]}", None)
            return execute.run(*what)

        def keep(report: Any, records: Any, change: str) -> dict[str, Any]:
            return archive.save(place, report, records, archive.Intent(change))

        found = sweep.vary(one, keep, spec, servers, measuring, setting, arguments.pairs)
    console = output.stdout(json_target=arguments.json)
    for value, comparison in found.items():
        console.print(f"\n{setting}: {values[0]} and {value}", style="bold")
        bench_compare.show(console, comparison)
    output.write_json(arguments.json, {value: comparison.as_json() for value, comparison in found.items()})
    return output.OK


def _spec(arguments: argparse.Namespace, level: float, *, closed: bool) -> LoadSpec:
    from headrace.bench.load.spec import Leg

    leg = Leg(level, requests=arguments.requests)
    return bench_load.spec_of(arguments, "closed" if closed else "open", (leg,))


def _setting(text: str) -> tuple[str, Sequence[str]]:
    name, equals, values = text.partition("=")
    found = list(dict.fromkeys(value for value in values.split(",") if value))
    if not name or not equals or len(found) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: expected SETTING=VALUE,VALUE,...")
    return name, found
