"""The charts of a run as data: what is drawn, not how. Times in milliseconds.

A chart is a title, a kind ("lines", "points" or "stack"), axes and series; `pages/bench.html` draws it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.bench import attribution
from headrace.bench.metrics import tpot
from headrace.bench.records import OK, Record

CDF_POINTS = 200
TIMELINE_POINTS = 2_000
SLICES = 60
GROUPS = (0, 25, 50, 75, 90, 95, 99, 100)  # percentiles of the time to first token that the stage stack is split by
_LATENCIES = (
    ("first token, P50", "ttft", "p50"),
    ("first token, P95", "ttft", "p95"),
    ("end to end, P50", "e2e", "p50"),
)

Chart = dict[str, Any]


def of_run(report: Mapping[str, Any], records: Sequence[Record]) -> list[Chart]:
    """The charts of a run: latency CDF, timeline, throughput, stage stack, and of a ramp the knee."""
    legs = report["legs"]
    ok = [record for record in records if record.outcome == OK and not record.slow_reader]
    if not ok:
        return []
    charts = [cdf(ok), timeline(records, report), throughput(records), stack(ok)]
    if len(legs) > 1:
        charts.append(knee([(one["level"], one["figures"]) for one in legs], report["load"]["loop"]))
    return [chart for chart in charts if chart["series"]]


def cdf(ok: Sequence[Record]) -> Chart:
    """Share of the requests that took at most so long."""
    views: dict[str, Callable[[Record], float | None]] = {
        "time to first token": lambda record: record.ttft_s,
        "end to end": lambda record: record.e2e_s,
        "time per output token": tpot,
    }
    series = []
    for name, view in views.items():
        values = np.sort([value for record in ok if (value := view(record)) is not None]) * 1e3
        if len(values):
            shares = np.linspace(0, 1, min(CDF_POINTS, len(values)))
            points = np.quantile(values, shares, method="inverted_cdf")
            series.append(_series(name, points, shares * 100))
    return _chart("Latency, cumulative", "lines", "ms", "% of requests", series, log_x=True)


def timeline(records: Sequence[Record], report: Mapping[str, Any]) -> Chart:
    """Each request's latency at the moment it was due; warm-up is shown apart, since it is left out of the figures."""
    starts = {one["leg"]: one["measured_from_s"] for one in report["legs"]}
    shown = [record for record in records if record.outcome == OK]
    shown = shown[:: max(1, len(shown) // TIMELINE_POINTS)]
    counted = [record for record in shown if record.sent_s >= starts.get(record.leg, 0.0)]
    left_out = [record for record in shown if record.sent_s < starts.get(record.leg, 0.0)]
    failed = [record for record in records if record.error]
    series = [
        _series(name, [record.intended_s for record in chosen], [getattr(record, of) * 1e3 for record in chosen])
        for name, chosen, of in (
            ("end to end", counted, "e2e_s"),
            ("time to first token", counted, "ttft_s"),
            ("warm-up, left out", left_out, "e2e_s"),
            ("failed", failed, "e2e_s"),
        )
        if chosen
    ]
    return _chart("Latency over time", "points", "seconds into the run", "ms", series, log_y=True)


def throughput(records: Sequence[Record]) -> Chart:
    """Tokens that arrived a second, over time."""
    arrived = [(at, count) for record in records for at, count in record.messages]
    if not arrived:
        return _chart("Throughput over time", "lines", "", "", [])
    times, counts = np.array(arrived).T
    edges = np.linspace(0.0, float(times.max()) + 1e-9, SLICES + 1)
    rates = np.histogram(times, edges, weights=counts)[0] / np.diff(edges)
    series = [_series("output tokens", (edges[:-1] + edges[1:]) / 2, rates)]
    return _chart("Throughput over time", "lines", "seconds into the run", "tokens/s", series)


def stack(ok: Sequence[Record]) -> Chart:
    """Mean stages of the time to first token, from the fastest requests to the slowest."""
    known = sorted((record for record in ok if record.receipt and record.messages), key=lambda record: record.ttft_s)
    groups = []
    for low, high in itertools.pairwise(GROUPS):
        inside = known[len(known) * low // 100 : len(known) * high // 100]
        if inside:
            groups.append((f"P{low}-{high}", [attribution.stages_s(record) for record in inside]))
    series = []
    for name in attribution.STAGES:
        values = [_rounded(np.mean([stages[name] for stages in own]) * 1e3) for _, own in groups]
        if any(values):
            series.append({"name": name.replace("_", " "), "values": values})
    chart = _chart("Time to first token by stage", "stack", "requests, fastest to slowest", "ms", series)
    return {**chart, "categories": [name for name, _ in groups]}


def of_knee(report: Mapping[str, Any], loop: str) -> list[Chart]:
    """The charts of a search for the knee: objectives, latency and throughput by load, and one against the other."""
    load = "requests a second" if loop == "open" else "requests at a time"
    marks = [[_rounded(report["knee"]["value"]), "knee"], [_rounded(report["recommended"]), "recommended"]]
    probes = report["probes"]
    shares = []
    for name, kept in (("objectives kept", True), ("objectives lost", False)):
        inside = [one for one in probes if one["kept"] == kept]
        if inside:
            within = [one["figures"]["slo_share"] * 100 for one in inside]
            shares.append(_series(name, [one["level"] for one in inside], within))
    levels = [(one["level"], one["figures"]) for one in probes]
    latencies = [
        _series(name, *np.array(points).T * [[1.0], [1e3]])
        for name, figure, share in _LATENCIES
        if (points := _medians(levels, figure, share))
    ]
    throughputs = [_series("output tokens", *np.array(_medians(levels, "output_tokens_per_s")).T)]
    by_load = [
        _chart("Requests within the objectives", "points", load, "%", shares, log_x=True),
        _chart("Latency by load, medians of the probes", "lines", load, "ms", latencies, log_x=True, log_y=True),
        _chart("Throughput by load, medians of the probes", "lines", load, "tokens/s", throughputs, log_x=True),
    ]
    return [*({**chart, "marks": marks} for chart in by_load), knee(levels, loop)]


def knee(levels: Sequence[tuple[float, Mapping[str, Any]]], loop: str) -> Chart:
    """Latency against throughput, a point for each level of load: the median of its probes."""
    series, rates = [], dict(_medians(levels, "output_tokens_per_s"))
    for name, figure, share in _LATENCIES:
        latencies = _medians(levels, figure, share)
        if latencies:
            x = [rates[level] for level, _ in latencies]
            one = _series(name, x, [latency * 1e3 for _, latency in latencies])
            series.append({**one, "labels": [f"{level:.3g}" for level, _ in latencies]})
    unit = "requests a second" if loop == "open" else "requests at a time"
    return _chart(
        "Throughput against latency", "lines", f"output tokens/s, at so many {unit}", "ms", series, log_y=True
    )


def _medians(
    levels: Sequence[tuple[float, Mapping[str, Any]]], figure: str, share: str | None = None
) -> list[tuple[float, float]]:
    """(level, median of a figure over its probes), rising."""
    found: dict[float, list[float]] = {}
    for level, figures in levels:
        value = figures[figure][share] if share else figures[figure]
        if value is not None:
            found.setdefault(level, []).append(value)
    return [(level, float(np.median(found[level]))) for level in sorted(found)]


def _chart(
    title: str, kind: str, x: str, y: str, series: list[Any], *, log_x: bool = False, log_y: bool = False
) -> Chart:
    return {"title": title, "kind": kind, "x": x, "y": y, "logX": log_x, "logY": log_y, "series": series}


def _series(name: str, x: Any, y: Any) -> dict[str, Any]:
    return {"name": name, "points": [[_rounded(one), _rounded(other)] for one, other in zip(x, y, strict=True)]}


def _rounded(value: Any) -> float:
    return float(f"{float(value):.5g}")
