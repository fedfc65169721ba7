"""Counter-based draws: a number is a function of (seed, position, token id), whatever was drawn before.

So an answer does not depend on who else is in the batch, on preemption, or on being resumed: the draw for a
token at some position of its sequence is always the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def gumbel(seed: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Standard Gumbel noise for each token id, for an int64 seed and a position >= 0.

    The argmax of logits plus this noise is a draw from their softmax (Gumbel, 1954; Maddison, Tarlow and Minka, "A*
    Sampling", 2014).
    """
    return np.asarray(-np.log(-np.log(uniform(seed, position, token_ids))))


def uniform(seed: int, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Numbers in (0, 1) with 53 random bits: splitmix64's finaliser (Steele, Lea and Flood, 2014) in three rounds."""
    bits = _mix_all(token_ids.astype(np.uint64) * np.uint64(_GOLDEN) ^ np.uint64(row_key(seed, position)))
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) / (1 << 53)


def row_key(seed: int, position: int) -> int:
    """What the draws of all tokens at a position have in common: the first two rounds, below 2^64."""
    return _mix((_mix((seed & _MASK) + _GOLDEN) ^ position) + _GOLDEN)


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def _mix_all(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix` of each; products wrap around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_FIRST)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_SECOND)
    return values ^ (values >> np.uint64(31))
