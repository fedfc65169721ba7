"""Llama 3's rotary scaling, recovered from the factors that a GGUF file holds in its place.

A Hugging Face configuration names four numbers; llama.cpp keeps only what follows from them, the divisor of each
frequency (tensor rope_freqs.weight). The numbers are found again and must give the same divisors.
Scaling: https://arxiv.org/abs/2407.21783, section 3.2, as in Llama 3.1's published code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

Factors = np.ndarray[Any, np.dtype[np.float64]]

_TOLERANCE = 1e-3  # relative; the file's divisors are 32-bit and the context is a whole number
_USUAL = tuple((1.0, 4.0, 1 << power) for power in (13, 12, 11, 14, 15, 10, 9, 8, 7, 6))  # low, high, context


def factors(head_dim: int, theta: float, factor: float, low: float, high: float, context: int) -> Factors:
    """The divisor of each frequency, [head_dim / 2]."""
    turns = context * _frequencies(head_dim, theta) / (2 * math.pi)  # rotations within the original context
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return np.asarray(1 / ((1 - blend) / factor + blend), dtype=np.float64)


def recover(found: Factors, theta: float) -> dict[str, Any] | None:
    """The `rope_scaling` of config.json that gives the divisors `found`, [head_dim / 2]; None if none does."""
    head_dim = 2 * len(found)
    if not np.isfinite(found).all() or (found < 1 - _TOLERANCE).any():
        return None
    factor = float(f"{found.max():.6g}")
    for low, high, context in (*_USUAL, *_solutions(found, theta, factor)):
        if np.allclose(factors(head_dim, theta, factor, low, high, context), found, rtol=_TOLERANCE):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    return None


def _solutions(found: Factors, theta: float, factor: float) -> Iterator[tuple[float, float, int]]:
    """Solve for the numbers from the divisors strictly between 1 and the factor.

    There the blend is linear in the frequency: slope context / (2 pi (high - low)), intercept
    -low / (high - low). Only ratios of low, high and context matter, so low is 1.
    """
    between = (found > 1 + _TOLERANCE) & (found < factor * (1 - _TOLERANCE))
    if between.sum() < 2:
        return
    blend = (1 / found[between] - 1 / factor) / (1 - 1 / factor)
    slope, intercept = np.polyfit(_frequencies(2 * len(found), theta)[between], blend, 1)
    if intercept < 0 < slope:
        span = -1 / intercept
        yield 1.0, float(f"{1 + span:.6g}"), max(1, round(float(slope) * 2 * math.pi * span))


def _frequencies(head_dim: int, theta: float) -> Factors:
    return np.asarray(theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim), dtype=np.float64)
