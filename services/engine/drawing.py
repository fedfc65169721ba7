"""Draws one token of a row: what min_p, top_k and top_p leave of its tokens, and whose noise wins.

Knows numbers and parameters, no requests. Written so that another program can do the same to the last bit (the C++
extension does): probabilities are whole numbers, whose sums do not depend on their order, and a tie is cut by id.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from services.engine.randomness import gumbel
from services.engine.request import SamplingParams

NEGLIGIBLE = 25.0  # tokens this far below the peak, 1e-11 of its probability, are never drawn
_UNIT = 1 << 40
_CANDIDATES = 512  # most likely tokens looked at first; a row that needs more is sorted whole


def draw(values: NDArray[np.float32], sampling: SamplingParams, seed: int, position: int) -> int:
    """Draw one token.

    Each token has noise of its own, and the highest sum wins: rounding of the logits moves the choice only when the two
    best sums nearly tie. (Along cumulated probabilities it moves every boundary after it, and among thousands of
    unlikely tokens there is always one nearby.)

    Args:
        values: [vocabulary] logits over temperature, the highest 0.
        sampling: min_p, top_k and top_p apply, in this order.
        seed: the request's.
        position: the token's, in its sequence.
    """
    token_ids = survivors(values, sampling)
    return int(token_ids[np.argmax(values[token_ids] + gumbel(seed, position, token_ids))])


def survivors(values: NDArray[np.float32], sampling: SamplingParams) -> NDArray[np.int64]:
    """Ids of the tokens that may be drawn, at least one."""
    lowest = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    ids = np.flatnonzero((values > -NEGLIGIBLE) & (values >= np.float64(lowest)))
    kept = ids.size
    if 0 < sampling.top_k < values.size:
        kept = min(kept, sampling.top_k)
    if sampling.top_p >= 1:
        return ids if kept == ids.size else ranked(values, ids, kept)
    if kept < ids.size:
        ids = ranked(values, ids, kept)
    goal = sampling.top_p * float(weights(values[ids]).sum())
    for count in (min(_CANDIDATES, ids.size), ids.size):
        first = ranked(values, ids, count)
        mass = weights(values[first]).cumsum().astype(np.float64)
        if mass[-1] >= goal:
            break
    return first[: int(np.searchsorted(mass, goal)) + 1]


def ranked(values: NDArray[np.float32], ids: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The ``count`` of the ids with the highest values, highest first; of equal ones the first."""
    if count < ids.size:
        lowest = np.partition(values[ids], ids.size - count)[ids.size - count]
        ids = ids[values[ids] >= lowest]
    return ids[np.argsort(-values[ids], kind="stable")[:count]]


def weights(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Probabilities over the peak's, in units of 2^-40, of values from 0 down.

    The exponential is that of Cephes (Moshier), expf, in float32: by products and sums in this order.
    """
    x = np.maximum(values, np.float32(-80.0))
    n = np.rint(x * np.float32(1.44269504))
    r = x - n * np.float32(0.693359375) - n * np.float32(-2.12194440e-4)
    p = r * np.float32(1.9875691500e-4) + np.float32(1.3981999507e-3)
    for coefficient in (8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + np.float32(coefficient)
    p = p * (r * r) + r + np.float32(1.0)
    return np.asarray((np.ldexp(p, n.astype(np.int32)) * np.float32(_UNIT)).astype(np.int64))
