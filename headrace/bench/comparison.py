"""Two versions compared by pairs of runs: PASS, FAIL or INCONCLUSIVE for each figure, and for all together.

A difference counts in both directions: a figure that is suddenly better than it should be is as suspicious as one that
is worse, and a baseline that is out of date hides the next regression. Times are judged by the bootstrap interval of
the ratio of pairs, with a wide tolerance; counters, which the same load always moves alike, by a narrow one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from headrace.bench import fingerprint
from headrace.bench.statistics import CONFIDENCE, FEWEST_PAIRS, Interval, paired_ratio

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
# To be called the same, both ends are tested one-sided at 5 %: the usual test of equivalence. All figures must pass, so
# that needs no correction for their number. Schuirmann, Journal of Pharmacokinetics and Biopharmaceutics 15, 1987.
EQUIVALENCE = 0.90
MOST_SHOWN = 1e3
Report = Mapping[str, Any]
# Of "cpu" a difference fails, as of "time"; where none is shown, it need not be the same within the tolerance. It sees
# what the clock of a busy machine does not. "shown" is not judged.
Kind = Literal["time", "cpu", "counter", "shown"]


class Refused(Exception):
    """These runs cannot be compared; the message says why, a line a reason."""


@dataclass(frozen=True)
class Tolerance:
    """How much a figure may change, as a share, before it counts."""

    time: float = 0.05
    counter: float = 0.01


@dataclass(frozen=True)
class Figure:
    """One figure of a run that is compared."""

    name: str
    kind: Kind
    read: Callable[[Report], float | None]
    higher_is_better: bool = False


@dataclass(frozen=True)
class Row:
    """What was found of one figure."""

    figure: Figure
    baseline: float  # medians over the runs
    candidate: float
    ratio: Interval
    verdict: str  # "" where it is not judged
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """What was found of all."""

    rows: Sequence[Row]
    pairs: int
    notes: Sequence[str] = field(default_factory=list)  # what differs as it should: code, named settings

    @property
    def verdict(self) -> str:
        """FAIL where one figure fails, PASS where all judged ones pass, else INCONCLUSIVE."""
        verdicts = {row.verdict for row in self.rows if row.verdict}
        return next((word for word in (FAIL, INCONCLUSIVE) if word in verdicts), PASS if verdicts else INCONCLUSIVE)

    def as_json(self) -> dict[str, Any]:
        """Everything by name."""
        rows = [
            {
                "figure": row.figure.name,
                "kind": row.figure.kind,
                "baseline": row.baseline,
                "candidate": row.candidate,
                "ratio": row.ratio.as_json(),
                "verdict": row.verdict,
                "why": row.why,
            }
            for row in self.rows
        ]
        return {"verdict": self.verdict, "pairs": self.pairs, "notes": list(self.notes), "figures": rows}


def compare(
    baseline: Sequence[Report],
    candidate: Sequence[Report],
    *,
    changed: Sequence[str] = (),
    tolerance: Tolerance | None = None,
    allow_better: bool = False,
) -> Comparison:
    """Compares run by run: the first of each are a pair, and so on.

    Args:
        baseline: reports, in the order in which they were made.
        candidate: as many.
        changed: settings that may differ: they are what is compared.
        tolerance: the default one where None.
        allow_better: an improvement passes.

    Raises:
        Refused: a run is invalid, or fingerprints differ in more than `changed` and the code.
    """
    _refuse(baseline, candidate, changed)
    figures = _figures(baseline[0])
    judged = sum(figure.kind in ("time", "cpu") for figure in figures)
    confidence = 1 - (1 - CONFIDENCE) / max(1, judged)  # Bonferroni: one false alarm in twenty comparisons, not figures
    rows = []
    for figure in figures:
        pairs = [(figure.read(one), figure.read(other)) for one, other in zip(baseline, candidate, strict=True)]
        known = [(one, other) for one, other in pairs if one is not None and other is not None]
        if known:
            rows.append(_row(figure, known, confidence, tolerance or Tolerance(), allow_better))
    return Comparison(
        rows, len(baseline), fingerprint.differences(baseline[0]["fingerprint"], candidate[0]["fingerprint"])
    )


def _row(
    figure: Figure, pairs: Sequence[tuple[float, float]], confidence: float, tolerance: Tolerance, allow_better: bool
) -> Row:
    baseline, candidate = (np.array(values, float) for values in zip(*pairs, strict=True))
    medians = float(np.median(baseline)), float(np.median(candidate))
    if figure.kind == "counter":  # none and none are alike; one more than none is not
        baseline, candidate = np.maximum(baseline, 1e-9), np.maximum(candidate, 1e-9)
    if not (baseline > 0).all() or not (candidate > 0).all():
        ratio = Interval(float("nan"), float("nan"), float("nan"), len(pairs))
        verdict, why = (INCONCLUSIVE, "not positive") if figure.kind == "time" else ("", "")
    else:
        both = baseline.tolist(), candidate.tolist()
        ratio = paired_ratio(*both, confidence=confidence)
        verdict, why = _judge(figure, ratio, paired_ratio(*both, confidence=EQUIVALENCE), tolerance, allow_better)
    return Row(figure, *medians, ratio, verdict, why)


def _judge(
    figure: Figure, ratio: Interval, narrow: Interval, tolerance: Tolerance, allow_better: bool
) -> tuple[str, str]:
    """Verdict and reason. A difference must show in `ratio`, sameness in `narrow`, see `EQUIVALENCE`."""
    if figure.kind == "shown":
        return "", ""
    allowed = tolerance.counter if figure.kind == "counter" else tolerance.time
    low, high = 1 / (1 + allowed), 1 + allowed
    outside = not low <= ratio.value <= high
    better = (ratio.value > 1) == figure.higher_is_better
    change = f"{ratio.value - 1:+.1%}"
    if ratio.value > MOST_SHOWN:
        change = "from none"
    if figure.kind == "counter":
        return (PASS, "") if not outside else (FAIL, change)
    if ratio.count < FEWEST_PAIRS:
        return INCONCLUSIVE, f"{FEWEST_PAIRS} pairs are the fewest"
    if outside and (ratio.low > 1 or ratio.high < 1):
        if better and allow_better:
            return PASS, f"better: {change}"
        return FAIL, f"{'better' if better else 'worse'}: {change}"
    if figure.kind == "cpu":
        return "", ""
    if low <= narrow.low and narrow.high <= high:
        return PASS, ""
    return INCONCLUSIVE, "more pairs would tell"


def _refuse(baseline: Sequence[Report], candidate: Sequence[Report], changed: Sequence[str]) -> None:
    if len(baseline) != len(candidate) or not baseline:
        raise Refused(f"runs are compared in pairs: {len(baseline)} of the baseline, {len(candidate)} of the candidate")
    reasons = [f"run {one['id']} is {one['verdict']}" for one in (*baseline, *candidate) if one["problems"]]
    for one, other in zip(baseline, candidate, strict=True):
        reasons += fingerprint.mismatches(one["fingerprint"], other["fingerprint"], changed)
    for side in (baseline, candidate):
        for one in side[1:]:
            reasons += fingerprint.mismatches(
                side[0]["fingerprint"], one["fingerprint"], ("workload.digest",), same_code=True
            )
    if reasons:
        raise Refused("\n".join(dict.fromkeys(reasons)))


def _figures(report: Report) -> list[Figure]:
    """Those of a report: of each leg its times, and the counters of the whole run."""

    def of_leg(number: int, *path: str) -> Callable[[Report], float | None]:
        def read(one: Report) -> float | None:
            value = one["legs"][number]["figures"]
            for name in path:
                value = value[name]
            return None if value is None else float(value)

        return read

    def of_run(part: str, name: str) -> Callable[[Report], float | None]:
        return lambda one: one[part].get(name)

    found = []
    for number, leg in enumerate(report["legs"]):
        at = f" at {leg['level']:g}" if len(report["legs"]) > 1 else ""
        throughput: Kind = "time" if report["load"]["loop"] == "closed" else "shown"  # an open loop gets what it sends
        found += [
            Figure(f"output tokens/s{at}", throughput, of_leg(number, "output_tokens_per_s"), higher_is_better=True),
            Figure(f"goodput, requests/s{at}", "shown", of_leg(number, "goodput_per_s"), higher_is_better=True),
            *(Figure(f"{name} p50{at}", "time", of_leg(number, name, "p50")) for name in ("ttft", "tpot", "e2e")),
            *(Figure(f"{name} p95{at}", "shown", of_leg(number, name, "p95")) for name in ("ttft", "tpot", "e2e")),
        ]
    found += [Figure(name.replace("_", " "), "counter", of_run("totals", name)) for name in report["totals"]]
    for name in report.get("cpu_ms_a_token", {}):
        of_all: Kind = "cpu" if name == "all" else "shown"
        found.append(Figure(f"CPU ms a token, {name}", of_all, of_run("cpu_ms_a_token", name)))
    for name in report["counters"]:
        kind: Kind = "shown" if name == "step_count" else "counter"  # how many share a step is a matter of time
        found.append(Figure(name.replace("_", " "), kind, of_run("counters", name)))
    return found
