"""Where a run becomes steady, and whether it stays so. Knows latencies in the order of sending, and nothing else.

Warm-up is a leading stretch of requests that the later ones do not resemble. It ends for good as soon as requests look
like the later ones, so a stall in the middle of a run is never taken for warm-up: it stays in the figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headrace.bench.statistics import Floats, percentile

FEWEST = 20  # requests; of fewer nothing is left out
BATCHES = 10
MOST_WARM_UP = 0.5
MARGIN = 0.05  # what differs by less is the same
MOST_TREND = 0.2  # share that the latency may rise or fall over a run
_ENDED = -4  # so many more requests of the usual kind than of another end the warm-up
_TREND_TAU = 0.73  # of ten batches: chance gives this one time in four hundred


@dataclass(frozen=True)
class Steadiness:
    """What was found."""

    warm_up: int  # leading requests to leave out
    trend: float  # relative change of the latency over the rest, where it is more than chance; else 0
    settled: bool = True  # whether the warm-up came to an end

    @property
    def problem(self) -> str:
        """Why nothing can be concluded; "" where it can."""
        if not self.settled:
            return f"not steady: no end of the warm-up within {MOST_WARM_UP:.0%} of the requests"
        if abs(self.trend) > MOST_TREND:
            return f"not steady: latency changes by {self.trend:+.0%} over the measured time"
        return ""


def find(latencies: Sequence[float], sizes: Sequence[int]) -> Steadiness:
    """Looks at a run.

    Args:
        latencies: seconds, one a request, in the order of sending.
        sizes: tokens of its prompt: latencies are compared among those of like size.
    """
    if len(latencies) < FEWEST:
        return Steadiness(0, 0.0)
    relative = _relative(np.asarray(latencies, float), np.asarray(sizes))
    warm_up = _warm_up(relative)
    return Steadiness(warm_up, _trend(relative[warm_up:]), warm_up < int(MOST_WARM_UP * len(relative)))


def _relative(latencies: Floats, sizes: np.ndarray) -> Floats:
    """Each latency over the median of its size, by powers of two."""
    buckets = np.log2(np.maximum(sizes, 1)).astype(int)
    relative = np.empty_like(latencies)
    for bucket in np.unique(buckets):
        inside = buckets == bucket
        relative[inside] = latencies[inside] / max(float(np.median(latencies[inside])), 1e-9)
    return relative


def _warm_up(values: Floats) -> int:
    """A running balance of requests outside and inside the range of the second half; warm-up ends at its peak.

    As in a CUSUM chart: Page, Continuous inspection schemes, Biometrika 41, 1954.
    """
    later = values[len(values) // 2 :]
    low, high = percentile(later, 0.01) * (1 - MARGIN), percentile(later, 0.99) * (1 + MARGIN)
    outside = (values < low) | (values > high)
    balance = np.cumsum(np.where(outside, 1, -1)[: int(MOST_WARM_UP * len(values))])
    ended = np.flatnonzero(balance <= _ENDED)
    seen = balance[: ended[0]] if len(ended) else balance
    if not len(seen) or seen.max() <= 0:
        return 0
    return int(np.argmax(seen)) + 1


def _trend(values: Floats) -> float:
    """Theil-Sen slope over the medians of ten batches, as a share; 0 where Kendall's tau does not bear it out.

    Of their logarithms: what falls to an eighth has changed by -87 %, not by a multiple of the median.
    """
    if len(values) < 5 * BATCHES:
        return 0.0
    medians = np.log([max(float(np.median(batch)), 1e-9) for batch in np.array_split(values, BATCHES)])
    later, earlier = np.triu_indices(BATCHES, 1)[::-1]
    steps = medians[later] - medians[earlier]
    if abs(np.sign(steps).mean()) < _TREND_TAU:
        return 0.0
    slope = float(np.median(steps / (later - earlier)))
    return math.expm1(slope * (BATCHES - 1))
