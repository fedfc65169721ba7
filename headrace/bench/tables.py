"""The report of a run as tables of text: printed by rich, and put into the page. Knows figures, not how they came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from headrace.bench import attribution, metrics

COLUMNS = ("count", "mean", "p50", "p90", "p95", "p99", "max")
NOT_STATED = "-"
# What changes over a soak: its name for people, and how much of the report's unit is one of theirs.
_SLOPES: Mapping[str, tuple[str, float]] = {
    "ttft_s": ("ttft, ms", 1e-3),
    "e2e_s": ("e2e, ms", 1e-3),
    "requests_per_s": ("requests/s", 1.0),
    "rss_bytes": ("memory, MiB", 2.0**20),
    "open_stream_count": ("open streams", 1.0),
    "kv_used_block_count": ("KV blocks in use", 1.0),
}
_HELD = ("rss_bytes", "open_stream_count", "kv_used_block_count")


@dataclass(frozen=True)
class Rows:
    """A table of text; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: bool = False  # the last column is prose

    def as_json(self) -> dict[str, Any]:
        """For the page."""
        return {"title": self.title, "columns": self.columns, "rows": self.rows, "text": self.text}


def of_run(report: Mapping[str, Any]) -> list[Rows]:
    """The tables of a run's legs: of a ramp one line a leg first."""
    legs = report["legs"]
    tables = [ramp(legs, report["load"]["loop"])] if len(legs) > 1 else []
    for one in legs:
        name = f", leg {one['leg']}" if len(legs) > 1 else ""
        tables += [
            latencies(one["figures"], f"latency in ms{name}"),
            rates(one, f"rates and counts{name}"),
            where(one["where"], f"where the P99 of the time to first token went{name}"),
            slowest(one["where"]["slowest"], f"the slowest{name}; headrace trace ID draws one"),
        ]
        tables += [latencies(own, f"{title}{name}: latency in ms") for title, own in one["classes"].items()]
    tables.append(slopes(report["slopes_an_hour"]))
    tables.append(Rows("what they mean", ("figure", ""), list(report["definitions"].items()), text=True))
    return [table for table in tables if table.rows]


def latencies(figures: Mapping[str, Any], title: str) -> Rows:
    """Distributions, a line each."""
    rows = [
        (name, str(figures[name]["count"]), *(ms(figures[name][column]) for column in COLUMNS[1:]))
        for name in metrics.LATENCIES
        if figures[name]["count"]
    ]
    return Rows(title, ("", *COLUMNS), rows)


def rates(leg: Mapping[str, Any], title: str) -> Rows:
    """Everything that is one number."""
    figures, warm_up = leg["figures"], leg["warm_up"]
    requests, tokens = figures["requests"], figures["tokens"]
    errors = ", ".join(f"{count} {name}" for name, count in requests["errors"].items())
    rows = [
        ("output tokens/s", f"{figures['output_tokens_per_s']:.1f}", f"{tokens['a_message']:.2f} tokens a message"),
        ("requests/s", f"{figures['requests_per_s']:.2f}", f"{figures['in_flight']:.1f} in flight on average"),
        ("goodput, requests/s", f"{figures['goodput_per_s']:.2f}", f"{figures['slo_share']:.1%} kept every objective"),
        ("measured", str(requests["measured"]), f"requests in {figures['measured_s']:.1f} s"),
        ("left out as warm-up", str(warm_up["requests"]), f"requests in {warm_up['seconds']:.1f} s"),
        ("failed", str(requests["failed"]), errors),
        ("cancelled", str(requests["cancelled"]), "as the load has it"),
        ("prompt tokens", str(tokens["prompt"]), f"{tokens['cached']} of them cached"),
        ("output tokens", str(tokens["output"]), "as the server's usage counts them"),
    ]
    return Rows(title, ("", "", ""), rows, text=True)


def where(explained: Mapping[str, Any], title: str) -> Rows:
    """The slowest against the middle, over all and by length of the prompt."""
    groups = {"all": explained["all"], **explained["by_prompt"]}
    rows = []
    for name, one in groups.items():
        if not one["tail_s"]:
            continue
        stage = attribution.largest(one)
        more = {key: one["tail_s"][key] - one["middle_s"][key] for key in one["tail_s"]}
        total = sum(more.values())
        share = f"{more[stage] / total:.0%}" if total > 0 else NOT_STATED
        rows.append(
            (
                name if name == "all" else f"prompt {name}",
                str(one["count"]),
                ms(one["p50_s"]),
                ms(one["p99_s"]),
                stage.replace("_", " "),
                ms(more[stage]),
                share,
            )
        )
    return Rows(title, ("", "count", "p50", "p99", "most of it in", "more than usual", "of it"), rows)


def slowest(found: Sequence[Mapping[str, Any]], title: str) -> Rows:
    """The slowest requests by time to first token, with the stage that most of it was in."""
    rows = []
    for one in found:
        stage = max(one["stages_s"], key=one["stages_s"].__getitem__)
        numbers = (str(one["prompt_tokens"]), ms(one["ttft_s"]), stage.replace("_", " "), ms(one["stages_s"][stage]))
        rows.append((one["trace_id"], *numbers))
    return Rows(title, ("trace ID", "prompt", "ttft", "most of it in", "of it"), rows)


def ramp(legs: Sequence[Mapping[str, Any]], loop: str) -> Rows:
    """A line a leg."""
    rows = []
    for one in legs:
        figures = one["figures"]
        numbers = [ms(figures[name][share]) for name, share in (("ttft", "p50"), ("ttft", "p95"), ("tpot", "p50"))]
        rates_ = [f"{figures[name]:.1f}" for name in ("output_tokens_per_s", "requests_per_s", "goodput_per_s")]
        rows.append((f"{one['level']:g}", one["verdict"], *rates_, *numbers))
    level = "requests/s" if loop == "open" else "at a time"
    columns = (level, "verdict", "tokens/s", "ended/s", "good/s", "ttft p50", "ttft p95", "tpot p50")
    return Rows("legs; latency in ms", columns, rows)


def print_tables(console: Console, tables: Sequence[Rows]) -> None:
    """Prints them."""
    for rows in tables:
        drawn = Table(title=rows.title, title_justify="left", box=None, pad_edge=False, show_header=any(rows.columns))
        for number, column in enumerate(rows.columns):
            prose = rows.text and number == len(rows.columns) - 1
            drawn.add_column(column, justify="left" if not number or prose else "right", style="dim" if prose else None)
        for row in rows.rows:
            drawn.add_row(*row)
        console.print(drawn)
        console.print()


def ms(seconds: float | None) -> str:
    """Milliseconds, or that there is no such figure."""
    return NOT_STATED if seconds is None else f"{seconds * 1e3:.1f}"


def of_invalid_run(report: Mapping[str, Any]) -> list[Rows]:
    """What is true however the load was made: what the server held, in a soak."""
    own = {name: one for name, one in report["slopes_an_hour"].items() if name.partition(" ")[0] in _HELD}
    return [slopes(own)] if own else []


def slopes(an_hour: Mapping[str, Mapping[str, float]]) -> Rows:
    """Changes over a soak, a line each."""
    rows = []
    for name, one in an_hour.items():
        what, _, of = name.partition(" ")
        title, scale = _SLOPES[what]
        numbers = [f"{one[key] / scale:.2f}" for key in ("median", "value", "low", "high")]
        rows.append((f"{title}, {of}" if of else title, *numbers, "yes" if one["changes"] else "no"))
    return Rows(
        "change an hour; the intervals of all hold 95 %", ("", "median", "an hour", "low", "high", "changes"), rows
    )
