"""`headrace bench sweep`: the knee of a server, or what one setting does."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.bench.results import RunFailed
from headrace.cli import bench_compare, bench_load, output
from headrace.cli.bench_course import Course
from headrace.cli.supervisor import ProgramDied
from headrace.cli.trace_page import fill

if TYPE_CHECKING:
    from headrace.bench.execute import Server
    from headrace.bench.knee import Knee
    from headrace.bench.load.spec import LoadSpec
    from headrace.bench.sweep import KneeSweep
    from headrace.bench.tables import Rows

TARGET = "target"  # what is varied is the server itself, by address


def add_parser(kinds: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = kinds.add_parser(
        "sweep",
        help="the knee by bisection, or one setting's values by turns",
        description="--knee finds the highest load at which 95 % of the requests keep their objectives, and recommends "
        "70 % of it. --vary compares the values of one setting with the first of them, A B B A, all servers up. Every "
        "run is archived as it ends, so a sweep that was interrupted goes on with --resume.",
        epilog=output.EXIT_CODES,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--knee", choices=("rate", "concurrency"), help="over what the load is raised")
    what.add_argument(
        "--vary",
        type=_setting,
        metavar="SETTING=VALUE,VALUE,...",
        help="max_num_seqs, max_num_batched_tokens, block_size, kv_memory_utilization, coalesce_tokens, or a HEADRACE_ "
        "variable; target=HOST:PORT,HOST:PORT: servers that are there, such as two builds",
    )
    knee = parser.add_argument_group("with --knee")
    knee.add_argument("--start", type=output.positive, default=4, metavar="N", help="first level (%(default)s)")
    knee.add_argument("--resolution", type=output.positive_number, default=0.1, metavar="SHARE", help="(%(default)s)")
    knee.add_argument("--repeats", type=output.positive, default=3, metavar="N", help="bisections; six hold 95 %% (3)")
    knee.add_argument(
        "--budget",
        type=output.seconds,
        default=float("inf"),
        metavar="SECONDS",
        help="no repetition but the first begins that would not end within (default: all are made)",
    )
    knee.add_argument("--html", type=Path, metavar="FILE", help="a page with the chart of the knee")
    vary = parser.add_argument_group("with --vary")
    level = vary.add_mutually_exclusive_group()
    level.add_argument("--rate", type=output.positive_number, metavar="R", help="open loop: requests a second")
    level.add_argument("--concurrency", type=output.positive, metavar="N", help="closed loop: at a time")
    vary.add_argument("--pairs", type=output.positive, default=8, metavar="N", help="of runs (%(default)s)")
    parser.add_argument("--requests", type=output.positive, default=150, metavar="N", help="of a run (%(default)s)")
    parser.add_argument(
        "--resume", action="store_true", help="take the runs of a sweep like this one that the archive has"
    )
    bench_load.add_load_options(parser)
    bench_load.add_measuring_options(parser)
    output.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it; raises CommandError."""
    bench_load.needs_numpy()
    output.expect_writable("--json", arguments.json)
    output.expect_writable("--html", arguments.html)
    from headrace.bench import archive, comparison, knee

    try:
        return _knee(arguments) if arguments.knee else _vary(arguments)
    except KeyboardInterrupt:
        output.stderr().print("the runs so far are kept; --resume goes on with them", soft_wrap=True)
        raise
    except (RunFailed, knee.NoKnee, archive.ArchiveError) as error:
        raise output.CommandError(str(error)) from error
    except comparison.Refused as error:
        reasons = str(error).replace("\n", "; ")
        raise output.CommandError(f"not comparable: {reasons}") from error
    except (ProgramDied, TimeoutError) as error:
        raise output.CommandError(f"the pipeline: {error}") from error


def _knee(arguments: argparse.Namespace) -> int:
    from headrace.bench import knee, tables
    from headrace.bench.sweep import UNLOADED_RUNS, KneeSweep

    spec = _spec(arguments, float(arguments.start), closed=arguments.knee == "concurrency")
    measuring = bench_load.measuring_of(arguments)
    _, expected = knee.expected_probes(arguments.resolution, arguments.repeats)
    unloaded = 0 if measuring.slo.as_json() else UNLOADED_RUNS
    with output.progress() as show, bench_load.server(arguments) as server:

        def about(spec: LoadSpec, _server: Server) -> str:
            if unloaded and not sweep.unloaded:
                return "without load"
            before = f" ({_probe_text(sweep.probes[-1])})" if sweep.probes else ""
            return f"at {spec.legs[0].level:.3g}{before}"

        course = Course(arguments, show, expected + unloaded, about)
        sweep = KneeSweep(course, spec, server, measuring, arguments.budget)
        found = sweep.find(arguments.start, resolution=arguments.resolution, repeats=arguments.repeats)
    report = _knee_report(arguments.knee, sweep, found)
    console = output.stdout(json_target=arguments.json)
    for line in knee_lines(report):
        console.print(line, soft_wrap=True)
    console.print()
    tables.print_tables(console, [knee_table(report)])
    output.write_json(arguments.json, report)
    if arguments.html:
        try:
            arguments.html.write_text(page(report, spec.loop), encoding="utf-8")
        except OSError as error:
            raise output.CommandError(f"--html {arguments.html}: {error.strerror}", output.BAD_USAGE) from error
    return output.OK


def _probe_text(one: Mapping[str, Any]) -> str:
    return f"{one['level']:.3g} {'kept' if one['kept'] else 'lost'}: {one['figures']['slo_share']:.0%} within"


def _knee_report(over: str, sweep: KneeSweep, found: Knee) -> dict[str, Any]:
    recommended = found.recommended
    return {
        "over": over,
        "unloaded_s": sweep.unloaded,
        "slo_s": sweep.measuring.slo.as_json(),
        "knee": found.level.as_json(),
        "repetitions": list(found.found),
        "recommended": recommended,
        "recommended_concurrency": recommended if over == "concurrency" else sweep.in_flight(recommended),
        "probes": sweep.probes,
    }


def knee_lines(report: Mapping[str, Any]) -> list[str]:
    """What was found, for people."""
    from headrace.bench.statistics import FEWEST_PAIRS

    knee, unit = report["knee"], "requests/s" if report["over"] == "rate" else "at a time"
    objectives = ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in report["slo_s"].items())
    unloaded = ", ".join(f"{name} {value * 1e3:.0f} ms" for name, value in report["unloaded_s"].items())
    certain = "95 % interval" if knee["count"] >= FEWEST_PAIRS else f"range of {knee['count']}, six hold 95 %"
    concurrency = max(1, int(report["recommended_concurrency"]))
    return [
        f"objectives: {objectives}" + (f" (without load: {unloaded})" if unloaded else ""),
        f"knee: {knee['value']:.3g} {unit}, {knee['low']:.3g} to {knee['high']:.3g} ({certain})",
        f"recommended, 70 % of it: {report['recommended']:.3g} {unit}; concurrency {concurrency}",
    ]


def knee_table(report: Mapping[str, Any]) -> Rows:
    """The probes, from the lowest level to the highest."""
    from headrace.bench.tables import Rows, ms

    rows = []
    for one in sorted(report["probes"], key=lambda one: one["level"]):
        figures = one["figures"]
        rates = [f"{figures[name]:.1f}" for name in ("output_tokens_per_s", "requests_per_s")]
        latencies = [ms(figures[name][share]) for name, share in (("ttft", "p50"), ("ttft", "p95"), ("tpot", "p50"))]
        lost = one["problems"][0].partition(":")[0] if one["problems"] else "lost"
        found = ("kept" if one["kept"] else lost, f"{figures['slo_share']:.1%}")
        rows.append((f"{one['level']:.3g}", *found, *rates, *latencies))
    over = "requests a second" if report["over"] == "rate" else "requests at a time"
    columns = ("", "slo", "within", "tokens/s", "ended/s", "ttft p50", "ttft p95", "tpot p50")
    return Rows(f"probes by {over}; latency in ms", columns, rows)


def page(report: Mapping[str, Any], loop: str) -> str:
    """The page of a knee."""
    from headrace.bench import charts

    objectives, found, recommended = knee_lines(report)
    data = {"title": found, "about": f"{recommended}; {objectives}", "verdict": "", "problems": []}
    return fill(
        "bench.html", {**data, "tables": [knee_table(report).as_json()], "charts": charts.of_knee(report, loop)}
    )


def _vary(arguments: argparse.Namespace) -> int:
    from headrace.bench import sweep

    if arguments.target:
        raise output.CommandError("--target has one value; several: --vary target=...", output.BAD_USAGE)
    name, values = arguments.vary
    setting = sweep.SETTINGS.get(name, name)
    if setting != TARGET and not setting.startswith("HEADRACE_"):
        known = ", ".join((*sweep.SETTINGS, TARGET))
        raise output.CommandError(f"--vary {name}: expected {known}, or a HEADRACE_ variable", output.BAD_USAGE)
    level = arguments.rate or float(arguments.concurrency or 8)
    spec = _spec(arguments, level, closed=not arguments.rate)
    measuring = bench_load.measuring_of(arguments)
    with ExitStack() as stack:
        show = stack.enter_context(output.progress())
        servers: dict[str, Server] = {}
        for value in values:
            show(f"{setting}={value}", None)
            servers[value] = stack.enter_context(_server_with(arguments, setting, value))

        def about(_spec: LoadSpec, server: Server) -> str:
            return f"{setting}={next(value for value, one in servers.items() if one is server)}"

        course = Course(arguments, show, len(values) + 2 * arguments.pairs * (len(values) - 1), about)
        found = sweep.vary(course, spec, servers, measuring, setting, arguments.pairs)
    console = output.stdout(json_target=arguments.json)
    for value, comparison in found.items():
        console.print(f"\n{setting}: {values[0]} and {value}", style="bold")
        bench_compare.show(console, comparison)
    output.write_json(arguments.json, {value: comparison.as_json() for value, comparison in found.items()})
    return output.OK


def _server_with(arguments: argparse.Namespace, setting: str, value: str) -> AbstractContextManager[Server]:
    """A pipeline with this setting; or one that is there already, such as another build's."""
    if setting == TARGET:
        return bench_load.server(argparse.Namespace(**{**vars(arguments), "target": value}))
    return bench_load.server(arguments, {setting: value})


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
