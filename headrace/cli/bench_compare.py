"""`headrace bench compare`, `gate` and `history`: what archived runs say together."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from headrace.cli import bench_load, output

if TYPE_CHECKING:
    from headrace.bench.comparison import Comparison

INCONCLUSIVE = 3
HISTORY = {"ttft": "p50", "tpot": "p50", "e2e": "p50", "output_tokens_per_s": None}


def add_parsers(kinds: Any) -> None:
    """Adds the subcommands."""
    compare: argparse.ArgumentParser = kinds.add_parser(
        "compare",
        help="two versions by pairs of archived runs, with intervals",
        description="Ratios of pairs with bootstrap intervals, and PASS, FAIL or INCONCLUSIVE for each figure, in both "
        "directions. Refuses invalid runs, and runs whose fingerprints differ in more than --changed and the code.",
        epilog=output.EXIT_CODES,
    )
    gate: argparse.ArgumentParser = kinds.add_parser(
        "gate",
        help="compare, for CI: the exit code is the verdict",
        description="As compare, tight on counters and loose on time.",
        epilog="exit codes: 0 PASS; 1 FAIL; 2 bad usage, or refused; 3 INCONCLUSIVE; 130 interrupted",
    )
    for parser, code in ((compare, lambda _verdict: output.OK), (gate, _exit_code)):
        parser.add_argument("--baseline", nargs="+", required=True, metavar="RUN", help="ids or folders")
        parser.add_argument(
            "--candidate", nargs="+", required=True, metavar="RUN", help="as many, in the order of pairs"
        )
        parser.add_argument("--changed", nargs="+", default=[], metavar="SETTING", help="that may differ")
        parser.add_argument("--time-tolerance", type=_share, default=0.05, metavar="SHARE", help="(%(default)s)")
        parser.add_argument("--counter-tolerance", type=_share, default=0.01, metavar="SHARE", help="(%(default)s)")
        parser.add_argument("--allow-better", action="store_true", help="an improvement passes")
        parser.add_argument("--archive", type=Path, metavar="DIR", help="where runs are kept (default: in the cache)")
        output.add_json_option(parser)
        parser.set_defaults(run=_compare, exit_code=code)
    history: argparse.ArgumentParser = kinds.add_parser(
        "history",
        help="archived runs in order, and where their figures changed",
        description="Valid runs of one leg, those of a kind together: the same hardware, model, settings and load "
        "but for its seed. A line marked with a figure's name is the first after a change of its level.",
        epilog=output.EXIT_CODES,
    )
    history.add_argument("--archive", type=Path, metavar="DIR", help="where runs are kept (default: in the cache)")
    output.add_json_option(history)
    history.set_defaults(run=_history)


def table(found: Comparison) -> Table:
    """A comparison for people."""
    from headrace.bench import comparison

    drawn = Table(title=f"{found.pairs} pairs", title_justify="left", box=None, pad_edge=False)
    drawn.add_column("", no_wrap=True)
    for name in ("baseline", "candidate", "ratio", "interval"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("", min_width=len(comparison.INCONCLUSIVE), no_wrap=True)
    for row in found.rows:
        interval = f"{row.ratio.low:.3f}-{row.ratio.high:.3f}" if row.figure.kind != "counter" else ""
        ratio = "" if row.ratio.value > comparison.MOST_SHOWN else f"{row.ratio.value:.3f}"
        numbers = (f"{row.baseline:.4g}", f"{row.candidate:.4g}", ratio, interval)
        drawn.add_row(row.figure.name, *numbers, row.verdict, style=None if row.verdict else "dim")
    return drawn


def show(console: Any, comparison: Comparison) -> None:
    """Prints a comparison: verdict, reasons, what differs, figures."""
    console.print(comparison.verdict, style="bold")
    for row in comparison.rows:
        if row.why:
            console.print(f"  {row.figure.name}: {row.why}", soft_wrap=True)
    for note in comparison.notes:
        console.print(f"  {note}", soft_wrap=True)
    console.print(table(comparison))


def _compare(arguments: argparse.Namespace) -> int:
    bench_load.needs_numpy()
    from headrace.bench import archive, comparison

    place = arguments.archive or archive.directory()
    tolerance = comparison.Tolerance(arguments.time_tolerance, arguments.counter_tolerance)
    try:
        sides = [[archive.load(place, name) for name in names] for names in (arguments.baseline, arguments.candidate)]
        found = comparison.compare(
            *sides, changed=arguments.changed, tolerance=tolerance, allow_better=arguments.allow_better
        )
    except archive.ArchiveError as error:
        raise output.CommandError(str(error), output.BAD_USAGE) from error
    except comparison.Refused as error:
        reasons = str(error).replace("\n", "; ")
        raise output.CommandError(f"not comparable: {reasons}", output.BAD_USAGE) from error
    intents = [side[-1]["intent"] for side in sides]
    show(output.stdout(json_target=arguments.json), found)
    output.write_json(arguments.json, {**found.as_json(), "intent": {"baseline": intents[0], "candidate": intents[1]}})
    return int(arguments.exit_code(found.verdict))


def _exit_code(verdict: str) -> int:
    return {"PASS": output.OK, "FAIL": output.FAILED}.get(verdict, INCONCLUSIVE)


def _history(arguments: argparse.Namespace) -> int:
    bench_load.needs_numpy()
    from headrace.bench import archive

    try:
        runs = archive.all_runs(arguments.archive or archive.directory())
    except archive.ArchiveError as error:
        raise output.CommandError(str(error), output.BAD_USAGE) from error
    usable = [run for run in runs if not run["problems"] and len(run["legs"]) == 1]
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for run in usable:
        kinds.setdefault(_kind(run), []).append(run)
    groups = [_group(group) for group in kinds.values()]
    console = output.stdout(json_target=arguments.json)
    console.print(f"{len(runs)} runs, {len(usable)} of them valid and of one leg")
    for group in groups:
        console.print(_history_table(group))
    output.write_json(arguments.json, groups)
    return output.OK


def _kind(run: Mapping[str, Any]) -> str:
    """What runs of one series have in common."""
    part = run["fingerprint"]
    load = {name: value for name, value in run["load"].items() if name != "seed"}
    return repr((part["hardware"], part["model"], part["configuration"], load))


def _group(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A series with the names of the figures that changed at each run."""
    from headrace.bench import change_points

    series = {
        name: [_figure(run["legs"][0]["figures"], name, share) for run in runs] for name, share in HISTORY.items()
    }
    changes = {
        name: change_points.find([float("nan") if value is None else value for value in values])
        for name, values in series.items()
    }
    rows = [
        {
            "id": run["id"],
            "code": run["fingerprint"]["versions"]["code"],
            "change": run["intent"]["change"],
            "figures": {name: values[place] for name, values in series.items()},
            "changed": [name for name, places in changes.items() if place in places],
        }
        for place, run in enumerate(runs)
    ]
    return {"load": runs[0]["load"], "runs": rows}


def _figure(figures: Mapping[str, Any], name: str, share: str | None) -> float | None:
    value: float | None = figures[name][share] if share else figures[name]
    return value


def _history_table(group: Mapping[str, Any]) -> Table:
    title = f"{bench_load.load_text(group['load'])}; p50 in ms"
    drawn = Table(title=title, title_justify="left", box=None, pad_edge=False)
    drawn.add_column("run", no_wrap=True, min_width=max(len(row["id"]) for row in group["runs"]))
    drawn.add_column("code")
    for name in HISTORY:
        drawn.add_column(name.removeprefix("output_").replace("_per_", "/"), justify="right")
    drawn.add_column("changed")
    drawn.add_column("", style="dim")
    for row in group["runs"]:
        numbers = [
            "-" if value is None else f"{value * (1e3 if HISTORY[name] else 1):.1f}"
            for name, value in row["figures"].items()
        ]
        drawn.add_row(row["id"], row["code"], *numbers, ", ".join(row["changed"]), row["change"])
    return drawn


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share between 0 and 1")
    return value
