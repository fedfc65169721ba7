"""A run's records become its report: leg by leg the verdict, then the figures, then where the time went."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.bench import attribution, metrics, steady, validity
from headrace.bench.load.spec import LoadSpec
from headrace.bench.load.workers import ClientUse
from headrace.bench.metrics import Slo
from headrace.bench.records import CANCELLED, OK, Record
from headrace.bench.statistics import CONFIDENCE, slope

SLICES = 20  # of a run, for its slopes
FEWEST_POINTS = 10  # of a slope
LEAST_CHANGE = 0.01  # of the median, over a run: what grows by less is not told
SHORTEST_S = 300.0  # of a run whose changes an hour mean something
_CLASSES = ("priority", "tenant")


@dataclass(frozen=True)
class Evidence:
    """Everything that was seen of a run."""

    records: Sequence[Record]  # in the order of sending
    uses: Sequence[ClientUse]
    samples: Sequence[Mapping[str, Any]] = ()  # of the server, see `server_watch.as_json`
    counters: Mapping[str, int] | None = None
    cpu_s: Mapping[str, float] | None = None  # of the server's processes, where they are known
    dropped_spans: float | None = None


def report(spec: LoadSpec, evidence: Evidence, slo: Slo, fewest: int = validity.FEWEST_REQUESTS) -> dict[str, Any]:
    """The report of a run; times in seconds.

    Args:
        spec: its load.
        evidence: what was seen.
        slo: objectives, for the goodput.
        fewest: requests that a leg must have measured.
    """
    legs = [
        _leg(number, spec, evidence, slo, fewest)
        for number in range(len(spec.legs))
        if any(record.leg == number for record in evidence.records)
    ]
    problems = [f"leg {one['leg']}: {text}" if len(legs) > 1 else text for one in legs for text in one["problems"]]
    if not legs:
        problems = ["too few samples: no request was made"]
    return {
        "verdict": validity.verdict(problems),
        "problems": problems,
        "load": spec.as_json(),
        "load_digest": spec.digest,
        "slo_s": slo.as_json(),
        "legs": legs,
        "totals": _totals(evidence.records),
        "counters": dict(evidence.counters or {}),
        "cpu_ms_a_token": _cpu_ms(evidence),
        "slopes_an_hour": slopes(spec, evidence),
        "definitions": dict(metrics.DEFINITIONS),
    }


def _leg(number: int, spec: LoadSpec, evidence: Evidence, slo: Slo, fewest: int) -> dict[str, Any]:
    made = [record for record in evidence.records if record.leg == number]
    begin_s, problems = _steady_from(made)
    measured = [record for record in made if record.sent_s >= begin_s]
    checks = validity.check(
        measured,
        evidence.uses,
        steadiness=problems,
        dropped_spans=evidence.dropped_spans,
        fewest=fewest,
        shared=spec.shared,
    )
    return {
        "leg": number,
        "level": spec.legs[number].level,
        "verdict": checks.verdict,
        "problems": list(checks.problems),
        "checks": dict(checks.facts),
        "measured_from_s": begin_s,
        "warm_up": {"requests": len(made) - len(measured), "seconds": begin_s - made[0].sent_s},
        "figures": metrics.figures(measured, evidence.records, slo),
        "classes": _classes(measured, evidence.records, slo),
        "where": attribution.explain(measured),
    }


def _steady_from(made: Sequence[Record]) -> tuple[float, list[str]]:
    """When the first request that counts was sent, and what is not steady after it."""
    begin_s, problems = made[0].sent_s, []
    views: dict[str, tuple[list[Record], Callable[[Record], float], Callable[[Record], int]]] = {
        "time to first token": ([r for r in made if r.messages], lambda r: r.ttft_s, lambda r: r.prompt_tokens),
        "end to end": (
            [r for r in made if r.outcome == OK and not r.slow_reader],
            lambda r: r.e2e_s,
            lambda r: r.planned_output,
        ),
    }
    for name, (records, latency, size) in views.items():
        found = steady.find([latency(r) for r in records], [size(r) for r in records])
        if records:
            begin_s = max(begin_s, records[found.warm_up].sent_s)
        if found.problem:
            problems.append(f"{found.problem} ({name})")
    return begin_s, problems


def _totals(records: Sequence[Record]) -> dict[str, int]:
    """What the whole run did, warm-up included: the same load does the same."""
    return {
        "requests": len(records),
        "failed_requests": sum(record.outcome not in (OK, CANCELLED) for record in records),
        "prompt_tokens": sum(record.prompt_tokens for record in records if record.outcome == OK),
        "output_tokens": sum(record.output_tokens for record in records if record.outcome == OK),
    }


def _cpu_ms(evidence: Evidence) -> dict[str, float]:
    """Processor time of the server's processes for a token that came, warm-up included; nothing where it is unknown."""
    tokens = sum(record.received_tokens for record in evidence.records)
    if not evidence.cpu_s or not tokens:
        return {}
    found = {"all": sum(evidence.cpu_s.values()), **evidence.cpu_s}
    return {name: 1e3 * used_s / tokens for name, used_s in found.items()}


def _classes(measured: Sequence[Record], records: Sequence[Record], slo: Slo) -> dict[str, dict[str, Any]]:
    """Figures of each priority and each tenant, where there are several."""
    found: dict[str, dict[str, Any]] = {}
    for name in _CLASSES:
        values = sorted({str(getattr(record, name)) for record in measured})
        for value in values if len(values) > 1 else ():
            inside = [record for record in measured if str(getattr(record, name)) == value]
            own = [record for record in records if str(getattr(record, name)) == value]
            found[f"{name} {value}"] = metrics.figures(inside, own, slo)
    return found


def slopes(spec: LoadSpec, evidence: Evidence) -> dict[str, dict[str, Any]]:
    """How latencies, throughput and the server's memory change an hour, with intervals; of short runs nothing.

    What changes is more than chance, and came to more than `LEAST_CHANGE` over the run. An open loop's throughput is
    its own.

    The intervals together hold 95 %: one false alarm in twenty soaks, not in twenty figures (Bonferroni).
    """
    records = evidence.records
    if not records or records[-1].sent_s - records[0].sent_s < SHORTEST_S:
        return {}
    series = {**_sliced(records), **_sampled(evidence.samples)}
    if spec.loop == "open":
        del series["requests_per_s"]
    known = {name: points for name, points in series.items() if len(points) >= FEWEST_POINTS}
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(known))
    found = {}
    for name, points in known.items():
        step = max(1, len(points) // (4 * SLICES))  # the slope looks at all pairs
        times, values = zip(*points[::step], strict=True)
        rise = slope([at / 3600 for at in times], values, confidence=confidence)
        median, hours = float(np.median(values)), (times[-1] - times[0]) / 3600
        beyond_chance = rise.low > 0 or rise.high < 0
        changes = beyond_chance and abs(rise.value) * hours > LEAST_CHANGE * abs(median)
        found[name] = {"median": median, **rise.as_json(), "changes": changes}
    return found


def _sliced(records: Sequence[Record]) -> dict[str, list[tuple[float, float]]]:
    """Medians of equal slices of the time of sending."""
    begun, ended = records[0].sent_s, records[-1].sent_s
    edges = np.linspace(begun, ended, SLICES + 1)
    found: dict[str, list[tuple[float, float]]] = {"ttft_s": [], "e2e_s": [], "requests_per_s": []}
    sent = np.array([record.sent_s for record in records])
    for low, high in itertools.pairwise(edges):
        inside = [records[int(place)] for place in np.flatnonzero((sent >= low) & (sent < high))]
        ok = [record for record in inside if record.outcome == OK and not record.slow_reader]
        at = float(low + high) / 2
        found["requests_per_s"].append((at, len(inside) / max(float(high - low), 1e-9)))
        if ok:
            found["ttft_s"].append((at, float(np.median([record.ttft_s for record in ok]))))
            found["e2e_s"].append((at, float(np.median([record.e2e_s for record in ok]))))
    return found


def _sampled(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        for name, value in sample["rss_bytes"].items():
            found.setdefault(f"rss_bytes {name}", []).append((sample["at_s"], value))
        engine = sample["engine"]
        # Free ones become fewer as the prefix cache fills, which is no leak.
        used = engine["kv_total_block_count"] - engine["kv_free_block_count"] - engine["kv_cached_block_count"]
        for name, value in (("open_stream_count", engine["open_stream_count"]), ("kv_used_block_count", used)):
            found.setdefault(name, []).append((sample["at_s"], value))
    return found
