"""What measured rounds say of the cost of tracing, and of its budget. Knows no pipeline."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.bench.statistics import Interval, median_interval, paired_ratio, percentile

MOST_THROUGHPUT_LOST = 0.02
MOST_FIRST_TOKEN_MS = 1.0
WITHIN, OVER, NOISY = "within", "over", "too noisy to tell from"


@dataclass
class Measured:
    """What one mode gave, round by round."""

    tokens_per_s: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)  # of each request of the one client, as it sees it
    cpu_ms: list[float] = field(default_factory=list)  # of the four processes, a request of the closed loop


@dataclass(frozen=True)
class Cost:
    """What a mode costs against the first one, each with its 95 % interval.

    Attributes:
        throughput: ratio, by the clock.
        first_token_ms: difference, by the clock.
        cpu_share: processor time that a request costs more, as a share of what one costs with the real engine.
    """

    throughput: Interval
    first_token_ms: Interval
    cpu_share: Interval

    @property
    def verdict(self) -> str:
        """Of the intervals, not of the estimates: throughput is within where the clock or processor time is sure of it.

        It is over where either is sure of that.
        """
        cheap = max(self.throughput.low, 1 - self.cpu_share.high) >= 1 - MOST_THROUGHPUT_LOST
        dear = min(self.throughput.high, 1 - self.cpu_share.low) < 1 - MOST_THROUGHPUT_LOST
        if dear or self.first_token_ms.low > MOST_FIRST_TOKEN_MS:
            return OVER
        return WITHIN if cheap and self.first_token_ms.high <= MOST_FIRST_TOKEN_MS else NOISY


def costs_of(real: Mapping[str, Measured], null: Mapping[str, Measured]) -> dict[str, Cost]:
    """What each mode but the first costs: by the clock from `real`, by processor time from `null`."""
    first, *others = real
    base_ms = statistics.median(real[first].cpu_ms)
    costs = {}
    for mode in others:
        more_ms = _difference(null[mode].cpu_ms, null[first].cpu_ms)
        costs[mode] = Cost(
            paired_ratio(real[first].tokens_per_s, real[mode].tokens_per_s),
            _difference(real[mode].first_token_ms, real[first].first_token_ms),
            Interval(more_ms.value / base_ms, more_ms.low / base_ms, more_ms.high / base_ms, more_ms.count),
        )
    return costs


def lines_of(title: str, found: Mapping[str, Measured]) -> list[str]:
    """For people: medians of each mode, and its differences to the first one."""
    first, *_ = found.values()
    lines = [f"{title}: medians of {len(first.tokens_per_s)} rounds; in brackets 95 % intervals of pairs"]
    for mode, own in found.items():
        p50, p99 = statistics.median(own.first_token_ms), percentile(own.first_token_ms, 0.99)
        lines.append(
            f"  {mode:<9} {statistics.median(own.tokens_per_s):7.1f} tok/s   first token p50 {p50:.2f} p99 {p99:.2f} ms"
            f"   cpu {statistics.median(own.cpu_ms):.3f} ms a request"
        )
        if own is not first:
            speed = _around(paired_ratio(first.tokens_per_s, own.tokens_per_s), 1, 100)
            later = _around(_difference(own.first_token_ms, first.first_token_ms))
            more = _around(_difference(own.cpu_ms, first.cpu_ms), 0, 1e3)
            lines.append(f"  {'':<9} throughput {speed} %   first token {later} ms   cpu {more} µs a request")
    return lines


def judge(costs: Mapping[str, Cost], dropped: int) -> tuple[list[str], bool]:
    """What is to be said of the budget, and whether it is kept; spans that a well collector lost spoil it."""
    budget = f"{MOST_THROUGHPUT_LOST * 100:g} % of throughput and {MOST_FIRST_TOKEN_MS:g} ms to the first token"
    lines = [
        f"{mode}: {cost.verdict} {budget}; processor time of a request {_around(cost.cpu_share, 0, 100)} %"
        for mode, cost in costs.items()
    ]
    if dropped:
        lines.append(f"{dropped} spans were dropped by a collector that is well: tracing did less than it should have")
    return lines, not dropped and all(cost.verdict == WITHIN for cost in costs.values())


def _difference(own: list[float], first: list[float]) -> Interval:
    return median_interval([one - other for one, other in zip(own, first, strict=True)])


def _around(interval: Interval, less: float = 0.0, times: float = 1.0) -> str:
    value, low, high = ((x - less) * times for x in (interval.value, interval.low, interval.high))
    return f"{value:+.2f} ({low:+.2f} to {high:+.2f})"
