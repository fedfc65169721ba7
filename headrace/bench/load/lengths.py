"""Token counts of prompts and answers, drawn from a distribution that one word of the command line names.

Every distribution is its quantile function: a number from 0 to 1 becomes a length. So two of them can be drawn with
correlated numbers (a Gaussian copula), whatever their shapes. Knows no request.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

_NORMAL = NormalDist()
SYNTAX = "N, LOW-HIGH, 70:32-128,30:256-512, lognormal:MEDIAN,SIGMA,LOW-HIGH, zipf:EXPONENT,LOW-HIGH, or cdf:FILE"


class BadLoad(ValueError):
    """A load that cannot be made; the message names what is wrong and its value."""


class Lengths(Protocol):
    """A distribution of lengths, in tokens."""

    def at(self, share: float) -> int:
        """The length at a quantile, 0 to 1."""


@dataclass(frozen=True)
class Mixture:
    """Uniform ranges, each with its share of the requests."""

    upper_shares: Sequence[float]  # running totals, the last one 1
    ranges: Sequence[tuple[int, int]]  # both ends included

    def at(self, share: float) -> int:
        """See `Lengths`."""
        place = min(bisect.bisect_right(self.upper_shares, share), len(self.ranges) - 1)
        below = self.upper_shares[place - 1] if place else 0.0
        inside = (share - below) / (self.upper_shares[place] - below)
        low, high = self.ranges[place]
        return min(high, low + int(inside * (high - low + 1)))


@dataclass(frozen=True)
class Lognormal:
    """A lognormal distribution, cut at both ends."""

    median: float
    sigma: float
    low: int
    high: int

    def at(self, share: float) -> int:
        """See `Lengths`."""
        normal = _NORMAL.inv_cdf(min(max(share, 1e-9), 1 - 1e-9))
        return min(self.high, max(self.low, round(self.median * math.exp(self.sigma * normal))))


@dataclass(frozen=True)
class Table:
    """Lengths with their running shares: an empirical distribution, or one that was worked out (Zipf)."""

    lengths: Sequence[int]
    upper_shares: Sequence[float]

    def at(self, share: float) -> int:
        """See `Lengths`."""
        return self.lengths[min(bisect.bisect_right(self.upper_shares, share), len(self.lengths) - 1)]


def parse(text: str, name: str) -> Lengths:
    """The distribution of a word like those of `SYNTAX`.

    Args:
        text: the word.
        name: of the option, for the error.

    Raises:
        BadLoad: it is none; the message names the option and the word.
    """
    kind, _, rest = text.partition(":")
    try:
        if kind == "lognormal":
            median, sigma, bounds = _parts(rest, 3)
            low, high = _range(bounds)
            return Lognormal(_positive(median), _positive(sigma), low, high)
        if kind == "zipf":
            exponent, bounds = _parts(rest, 2)
            return _zipf(_positive(exponent), *_range(bounds))
        if kind == "cdf":
            return _empirical(Path(rest))
        return _mixture(text)
    except OSError as error:
        raise BadLoad(f"{name}: {rest}: {error.strerror}") from error
    except ValueError as error:
        raise BadLoad(f"{name}: {text!r}: {error}; expected {SYNTAX}") from error


def correlated(first: float, second: float, correlation: float) -> tuple[float, float]:
    """Two independent uniform numbers as two with this correlation of their normal scores."""
    if not correlation:
        return first, second
    one, other = (_NORMAL.inv_cdf(min(max(share, 1e-9), 1 - 1e-9)) for share in (first, second))
    return first, _NORMAL.cdf(correlation * one + math.sqrt(1 - correlation**2) * other)


def _mixture(text: str) -> Mixture:
    shares, ranges = [], []
    for part in text.split(","):
        weight, colon, bounds = part.rpartition(":")
        shares.append(_positive(weight) if colon else 1.0)
        ranges.append(_range(bounds))
    total = math.fsum(shares)
    running = [sum_ / total for sum_ in itertools.accumulate(shares)]
    return Mixture((*running[:-1], 1.0), ranges)


def _zipf(exponent: float, low: int, high: int) -> Table:
    """Rank 1 is the shortest length: P(length) falls with (length - low + 1) ** -exponent."""
    weights = [rank**-exponent for rank in range(1, high - low + 2)]
    total = math.fsum(weights)
    return Table(range(low, high + 1), [sum_ / total for sum_ in itertools.accumulate(weights)])


def _empirical(path: Path) -> Table:
    """Lines `length,share`: share of the requests up to this length, rising to 1."""
    lengths, shares = [], []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        length, _, share = line.partition(",")
        lengths.append(_length(length))
        shares.append(float(share))
        if len(shares) > 1 and (shares[-1] <= shares[-2] or lengths[-1] <= lengths[-2]):
            raise ValueError(f"line {number}: lengths and shares must rise")
    if not shares or abs(shares[-1] - 1) > 1e-6:
        raise ValueError("the last share must be 1")
    return Table(lengths, shares)


def _parts(text: str, count: int) -> list[str]:
    found = text.split(",")
    if len(found) != count:
        raise ValueError(f"{len(found)} values, {count} are needed")
    return found


def _range(text: str) -> tuple[int, int]:
    low, dash, high = text.partition("-")
    bounds = (_length(low), _length(high) if dash else _length(low))
    if bounds[0] > bounds[1]:
        raise ValueError(f"{text}: the shortest is longer than the longest")
    return bounds


def _length(text: str) -> int:
    if not text.strip().isdigit() or int(text) < 1:
        raise ValueError(f"{text!r} is no length")
    return int(text)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise ValueError(f"{text} is not positive")
    return value
