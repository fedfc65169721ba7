"""Where a series of figures changes its level: the archive's memory of what nobody noticed at the time.

Pettitt's test says whether, by ranks, so that one odd run is no change; least absolute deviations say where. It looks
at the runs since the last change as they came, one more each time, so a change that was taken back later is found too.
Pettitt, A non-parametric approach to the change-point problem, Applied Statistics 28, 1979.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headrace.bench.statistics import Floats

SIGNIFICANCE = 0.001  # of one look; a series is looked at once a run
FEWEST = 4  # values on each side


def find(values: Sequence[float]) -> list[int]:
    """Places of the first values after a change, rising.

    Args:
        values: figures in the order of time; nan where a run has none.
    """
    series = np.asarray(values, float)
    found: list[int] = []
    begun, end = 0, 2 * FEWEST
    while end <= len(series):
        place = _change(series[begun:end])
        if place is None:
            end += 1
            continue
        begun += place
        found.append(begun)
        end = begun + 2 * FEWEST
    return found


def _change(values: Floats) -> int | None:
    """The place of the one change, or None."""
    count = len(values)
    signs = np.nan_to_num(np.sign(values[:, None] - values[None, :]))  # [values, values]
    # How often a value before a place is above one from it on, less how often it is below.
    above = np.array([abs(signs[:place, place:].sum()) for place in range(FEWEST, count - FEWEST + 1)])
    chance = 2 * math.exp(-6 * float(above.max()) ** 2 / (count**3 + count**2))
    return (
        None if chance > SIGNIFICANCE else min(range(FEWEST, count - FEWEST + 1), key=lambda p: _deviation(values, p))
    )


def _deviation(values: Floats, place: int) -> float:
    """How far values are from the medians of the two sides of a place."""
    return float(sum(np.nansum(np.abs(side - np.nanmedian(side))) for side in (values[:place], values[place:])))
