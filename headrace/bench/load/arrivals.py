"""When the requests of an open loop are due. Knows no request.

An open loop does not wait for answers, so a server that stalls is seen by everything that was due meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from headrace.bench.load.lengths import BadLoad

SYNTAX = "poisson, constant, or gamma:CV (coefficient of variation of the gaps; 1 is Poisson, more is burstier)"

_ROUNDING_S = 1e-9  # a thousand equal gaps do not add up exactly


def gaps_s(process: str, rate: float, draw: np.random.Generator) -> Iterator[float]:
    """Seconds between one request and the next, without end.

    Args:
        process: a word like those of `SYNTAX`.
        rate: requests a second, on average.
        draw: where the randomness comes from.
    """
    shape = _shape(process)
    while True:
        if shape is None:
            yield 1 / rate
        else:
            yield from draw.gamma(shape, 1 / (rate * shape), size=1024).tolist()


def times_s(
    process: str, legs: Sequence[tuple[float, float | None, int | None]], draw: np.random.Generator
) -> Iterator[tuple[int, float]]:
    """(leg, seconds after the start) of each request, leg after leg.

    Args:
        process: a word like those of `SYNTAX`.
        legs: rate, and the seconds it is kept up or, where that is None, the number of requests.
        draw: where the randomness comes from.
    """
    begun_s = 0.0
    for leg, (rate, seconds, count) in enumerate(legs):
        at_s = begun_s
        for number, gap_s in enumerate(gaps_s(process, rate, draw)):
            if number == count or (seconds is not None and at_s >= begun_s + seconds - _ROUNDING_S):
                break
            yield leg, at_s
            at_s += gap_s
        begun_s = at_s if seconds is None else begun_s + seconds


def check(process: str) -> None:
    """Raises BadLoad where a word is none of `SYNTAX`."""
    _shape(process)


def _shape(process: str) -> float | None:
    """Shape of the gamma distribution of the gaps; None: all gaps are equal."""
    kind, _, rest = process.partition(":")
    if process == "constant":
        return None
    if process == "poisson":
        return 1.0
    try:
        if kind == "gamma" and 0 < (variation := float(rest)) < float("inf"):
            return variation**-2
    except ValueError:
        pass
    raise BadLoad(f"--arrivals {process!r}: expected {SYNTAX}")
