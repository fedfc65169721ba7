"""Finds the knee: the highest load at which a server still keeps its objectives. Knows levels and answers yes or no.

Doubling brackets it, bisection on a logarithmic scale narrows it down. One bisection is one throw of the dice, so it is
repeated with other requests, and the interval is that of the median over the repetitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.bench.statistics import Interval, median_interval

GROWTH = 2.0
MOST_STEPS = 12  # doublings or halvings before it gives up
KEPT_SHARE = 0.95  # of the requests that must keep the objectives
RECOMMENDED = 0.7  # of the knee: load comes in bursts, and beyond the knee latency has no bound

Probe = Callable[[float, int], bool]  # (level, seed): whether the objectives were kept


class NoKnee(Exception):
    """The load at which objectives fail is not within reach; the message is one line."""


@dataclass(frozen=True)
class Knee:
    """What was found."""

    level: Interval  # `count` repetitions; below six the interval is their range
    found: Sequence[float]  # of each repetition

    @property
    def recommended(self) -> float:
        """The level to run at."""
        return RECOMMENDED * self.level.value


def find(probe: Probe, start: float, *, resolution: float, repeats: int, whole: bool) -> Knee:
    """Searches.

    Args:
        probe: tries a level.
        start: where to begin.
        resolution: a bisection ends when its ends are closer than this share.
        repeats: bisections, each with a seed of its own.
        whole: levels are whole numbers.

    Raises:
        NoKnee: even the lowest level tried fails, or the highest does not.
    """
    low, high = _bracket(probe, start, whole)
    found = [_bisect(probe, low, high, resolution, whole, seed=0)]
    for seed in range(1, repeats):
        # Another throw can lie beyond what the first one found.
        ends = (low / math.sqrt(GROWTH), high * math.sqrt(GROWTH))
        found.append(_bisect(probe, *ends, resolution, whole, seed))
    return Knee(median_interval(found), found)


def _bracket(probe: Probe, start: float, whole: bool) -> tuple[float, float]:
    """A level that keeps the objectives, and one `GROWTH` above that does not."""
    level = start
    good = probe(level, 0)
    for _ in range(MOST_STEPS):
        following = level * GROWTH if good else level / GROWTH
        if whole and following < 1:
            break
        if probe(following, 0) != good:
            return (level, following) if good else (following, level)
        level = following
    raise NoKnee(f"the objectives are {'still' if good else 'never'} kept at {level:g}")


def _bisect(probe: Probe, low: float, high: float, resolution: float, whole: bool, seed: int) -> float:
    """The highest level that kept the objectives; the ends are taken as tried."""
    if whole:
        low, high = math.floor(low), math.ceil(high)
    while high > low * (1 + resolution) and not (whole and high - low <= 1):
        middle = math.sqrt(max(low, 1e-9) * high)
        if whole:
            middle = min(high - 1, max(low + 1, round(middle)))
        low, high = (middle, high) if probe(middle, seed) else (low, middle)
    return low
