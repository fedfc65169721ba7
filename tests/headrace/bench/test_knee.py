"""Guarantees of the search for the knee."""

from __future__ import annotations

import random

import pytest

from headrace.bench import knee


@pytest.mark.parametrize("start", [1, 8, 200])
def test_the_knee_is_found_from_below_and_from_above(start: float) -> None:
    """To the resolution; 70 % of it is recommended."""
    found = knee.find(lambda level, _seed: level <= 37, start, resolution=0.05, repeats=3, whole=False)
    assert 37 / 1.05 <= found.level.value <= 37
    assert found.recommended == pytest.approx(0.7 * found.level.value)


def test_whole_levels_are_exact() -> None:
    """A concurrency is a number of clients."""
    assert knee.find(lambda level, _seed: level <= 13, 4, resolution=0.01, repeats=2, whole=True).found == [13, 13]


def test_the_interval_holds_the_knee_of_a_noisy_server() -> None:
    """Each repetition meets other requests; in 18 of 20 sweeps the interval of eight holds the true knee."""
    held = 0
    for sweep in range(20):
        draw = random.Random(sweep)
        found = knee.find(
            lambda level, _seed, draw=draw: level * draw.gauss(1, 0.08) <= 40,  # type: ignore[misc]
            10,
            resolution=0.02,
            repeats=8,
            whole=False,
        )
        held += found.level.low <= 40 <= found.level.high
    assert held >= 18


def test_a_level_that_is_out_of_reach_is_told() -> None:
    """A server that never fails, and one that always does."""
    for kept, word in ((True, "still"), (False, "never")):
        with pytest.raises(knee.NoKnee, match=word):
            knee.find(lambda _level, _seed, kept=kept: kept, 4, resolution=0.1, repeats=1, whole=True)  # type: ignore[misc]
