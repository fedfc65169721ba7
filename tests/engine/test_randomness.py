"""Guarantees of counter-based draws."""

from __future__ import annotations

import numpy as np

from services.engine.randomness import uniform
from services.engine.request import answer_seed


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    """The same pair gives the same number, int64 extremes included; it is in [0, 1)."""
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        draws = [uniform(seed, position) for position in range(100)]
        assert draws == [uniform(seed, position) for position in range(100)]
        assert all(0 <= draw < 1 for draw in draws)
        assert len(set(draws)) == 100


def test_draws_are_uniform_along_seeds_and_along_positions() -> None:
    """Ten buckets fill evenly (chi-square below its 99.99 % point), and neighbours do not correlate."""
    for draws in (
        np.array([uniform(seed, 7) for seed in range(20_000)]),
        np.array([uniform(7, position) for position in range(20_000)]),
    ):
        counts = np.histogram(draws, bins=10, range=(0, 1))[0]
        assert ((counts - 2000) ** 2 / 2000).sum() < 33.7
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_answers_of_one_request_have_seeds_of_their_own() -> None:
    """Answer 0 has the request's seed; all are int64 and differ."""
    seeds = [answer_seed(2**63 - 1, index) for index in range(50)]
    assert seeds[0] == 2**63 - 1
    assert len(set(seeds)) == 50
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
