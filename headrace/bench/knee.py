"""Finds the knee: the highest load at which a server still keeps its objectives. Knows levels and answers yes or no.

Doubling brackets it, bisection on a logarithmic scale narrows it down. One bisection is one throw of the dice, so it is
repeated with other requests, and the interval is that of the median over the repetitions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.bench.statistics import Interval, median_interval

GROWTH = 2.0
AGAIN = math.sqrt(GROWTH)  # growth of the repetitions, which begin at the knee that was found
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


def find(
    probe: Probe,
    start: float,
    *,
    resolution: float,
    repeats: int,
    whole: bool,
    go_on: Callable[[int], bool] = lambda _done: True,
) -> Knee:
    """Searches.

    Args:
        probe: tries a level.
        start: where to begin.
        resolution: a bisection ends when its ends are closer than this share.
        repeats: bisections, each with a seed of its own.
        whole: levels are whole numbers.
        go_on: asked before each repetition but the first, with the number of those that are done.

    Raises:
        NoKnee: even the lowest level tried fails, or the highest does not.
    """
    found: list[float] = []
    while len(found) < repeats and (not found or go_on(len(found))):
        seed = len(found)
        # Another throw can lie on either side of what was found, so it is bracketed anew, in smaller steps.
        begun, growth = (start, GROWTH) if not found else (_level(statistics.median(found), whole), AGAIN)
        ends = _bracket(probe, begun, growth, whole, seed)
        found.append(_bisect(probe, *ends, resolution, whole, seed))
    return Knee(median_interval(found), found)


def expected_probes(resolution: float, repeats: int) -> tuple[int, int]:
    """How many probes the first repetition will probably take, and how many all of them."""
    first, again = (2 + _steps(growth, resolution) for growth in (GROWTH, AGAIN))
    first += 2  # the start is seldom beside the knee
    return first, first + (repeats - 1) * again


def _steps(growth: float, resolution: float) -> int:
    """Of a bisection between a level and `growth` times it."""
    return max(0, math.ceil(math.log2(math.log(growth) / math.log1p(resolution))))


def _bracket(probe: Probe, start: float, growth: float, whole: bool, seed: int) -> tuple[float, float]:
    """A level that keeps the objectives, and one about `growth` times it that does not."""
    level = start
    good = probe(level, seed)
    for _ in range(MOST_STEPS):
        following = level * growth if good else level / growth
        if whole:
            following = max(level + 1, round(following)) if good else min(level - 1, round(following))
        if whole and following < 1:
            break
        if probe(following, seed) != good:
            return (level, following) if good else (following, level)
        level = following
    raise NoKnee(f"the objectives are {'still' if good else 'never'} kept at {level:g}")


def _level(value: float, whole: bool) -> float:
    return max(1, round(value)) if whole else value


def _bisect(probe: Probe, low: float, high: float, resolution: float, whole: bool, seed: int) -> float:
    """The highest level that kept the objectives; both ends were tried."""
    while high > low * (1 + resolution) and not (whole and high - low <= 1):
        middle = math.sqrt(low * high)
        if whole:
            middle = min(high - 1, max(low + 1, round(middle)))
        low, high = (middle, high) if probe(middle, seed) else (low, middle)
    return low
