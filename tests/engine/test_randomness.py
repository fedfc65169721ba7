"""Guarantees of counter-based draws."""

from __future__ import annotations

import numpy as np

from services.engine.randomness import gumbel, uniform
from services.engine.request import answer_seed

IDS = np.arange(20_000)


def test_a_draw_depends_on_seed_position_and_token_alone() -> None:
    """The same triple gives the same number, int64 extremes included, whichever other tokens are asked; in (0, 1)."""
    for seed in (0, 1, -1, 2**63 - 1, -(2**63)):
        draws = uniform(seed, 9, IDS)
        assert np.array_equal(draws, uniform(seed, 9, IDS))
        assert np.array_equal(draws[[7, 3]], uniform(seed, 9, np.array([7, 3])))
        assert draws.min() > 0
        assert draws.max() < 1
        assert np.unique(draws).size == draws.size


def test_draws_are_uniform_along_each_argument() -> None:
    """Ten buckets fill evenly (chi-square below its 99.99 % point), and neighbours do not correlate."""
    one = np.array([5])
    for draws in (
        np.array([uniform(seed, 7, one)[0] for seed in range(20_000)]),
        np.array([uniform(7, position, one)[0] for position in range(20_000)]),
        uniform(7, 7, IDS),
    ):
        counts = np.histogram(draws, bins=10, range=(0, 1))[0]
        assert ((counts - 2000) ** 2 / 2000).sum() < 33.7
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.03


def test_the_noisiest_logit_is_a_draw_from_the_softmax() -> None:
    """Over 20,000 positions each token wins as often as its probability says (chi-square, 99.99 % point)."""
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    logits, ids = np.log(probabilities), np.array([3, 99, 4_000, 49_151])
    winners = [int(np.argmax(logits + gumbel(11, position, ids))) for position in range(20_000)]
    expected = probabilities * 20_000
    assert ((np.bincount(winners, minlength=4) - expected) ** 2 / expected).sum() < 21.1


def test_answers_of_one_request_have_seeds_of_their_own() -> None:
    """Answer 0 has the request's seed; all are int64 and differ."""
    seeds = [answer_seed(2**63 - 1, index) for index in range(50)]
    assert seeds[0] == 2**63 - 1
    assert len(set(seeds)) == 50
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
