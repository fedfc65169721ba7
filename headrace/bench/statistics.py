"""What can be said from repeated measurements: percentiles, and ratios of pairs with bootstrap intervals.

The unit is the pair: two runs that followed one another and shared the machine's mood. Requests of one run depend on
each other, so intervals are made from pairs, never from the requests inside a run. Knows no measurement.

Percentile bootstrap: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

CONFIDENCE = 0.95
RESAMPLES = 10_000
SLOPE_RESAMPLES = 1_000
# Of n pairs, all lie on one side of the true median with probability 2 ** (1 - n): below six, no interval holds 95 %.
FEWEST_PAIRS = 6


@dataclass(frozen=True)
class Interval:
    """An estimate and where the true value lies, with the confidence asked for."""

    value: float
    low: float
    high: float
    count: int  # of what was resampled

    def as_json(self) -> dict[str, Any]:
        """Numbers by name."""
        return asdict(self)


def percentile(values: Sequence[float] | Floats, share: float) -> float:
    """The value at a percentile by nearest rank: one that was measured, none made up between two; nan of nothing.

    Args:
        values: in any order.
        share: 0 to 1.
    """
    if not len(values):
        return float("nan")
    return float(np.quantile(np.asarray(values, float), share, method="inverted_cdf"))


def paired_ratio(
    baseline: Sequence[float], candidate: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0
) -> Interval:
    """The median of candidate / baseline over pairs, with its bootstrap interval.

    Args:
        baseline: one positive figure a pair.
        candidate: the other one of the same pair.
        confidence: of the interval, 0 to 1. It is only reached from `FEWEST_PAIRS` on.
        seed: of the resampling: the same pairs give the same interval.

    Raises:
        ValueError: no pair, a figure without its pair, or one that is not positive and finite.
    """
    if len(baseline) != len(candidate) or not len(baseline):
        raise ValueError(f"pairs: {len(baseline)} of baseline, {len(candidate)} of candidate")
    both = np.asarray([baseline, candidate], float)
    if not (np.isfinite(both).all() and (both > 0).all()):
        raise ValueError("pairs: every figure must be positive and finite")
    return median_interval(both[1] / both[0], confidence=confidence, seed=seed)


def median_interval(values: Sequence[float] | Floats, *, confidence: float = CONFIDENCE, seed: int = 0) -> Interval:
    """The median of independent values with its bootstrap interval. Raises ValueError: there is none."""
    if not len(values):
        raise ValueError("values: none")
    taken = np.asarray(values, float)
    draws = np.random.default_rng(seed).integers(len(taken), size=(RESAMPLES, len(taken)))  # [resamples, values]
    medians = np.median(taken[draws], axis=1)
    low, high = np.quantile(medians, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(np.median(taken)), float(low), float(high), len(taken))


def slope(
    times: Sequence[float], values: Sequence[float], *, confidence: float = CONFIDENCE, seed: int = 0
) -> Interval:
    """The Theil-Sen slope, with its bootstrap interval over the points. Raises ValueError: fewer than three points."""
    if len(times) < 3 or len(times) != len(values):
        raise ValueError(f"slope: {len(times)} times, {len(values)} values; three or more are needed")
    at, taken = np.asarray(times, float), np.asarray(values, float)
    draws = np.random.default_rng(seed).integers(len(at), size=(SLOPE_RESAMPLES, len(at)))
    first, second = np.triu_indices(len(at), 1)

    def of(places: NDArray[np.int64]) -> float:
        run = at[places][second] - at[places][first]
        rise = taken[places][second] - taken[places][first]
        return float(np.median(rise[run != 0] / run[run != 0])) if run.any() else 0.0

    low, high = np.quantile([of(places) for places in draws], [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(of(np.arange(len(at))), float(low), float(high), len(at))
