"""Counter-based draws: a number is a function of (seed, position), whatever was drawn before.

So an answer does not depend on who else is in the batch, on preemption, or on being resumed: the draw for a
token at some position of its sequence is always the same.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, for an int64 seed and a position ≥ 0.

    Two rounds of the splitmix64 finaliser (Steele, Lea and Flood, 2014) over seed and position.
    """
    mixed = _mix((seed & _MASK) + _GOLDEN)
    mixed = _mix((mixed ^ position) + _GOLDEN)
    return (mixed >> 11) / (1 << 53)


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
