"""Guarantees of the statistics: intervals hold what they promise, percentiles are measured values."""

import numpy as np
import pytest

from headrace.bench import statistics


def test_percentiles_are_measured_values() -> None:
    """Nearest rank: P99 of 100 values is the 99th, P100 the largest; of nothing there is none."""
    values = list(range(100, 0, -1))
    assert [statistics.percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert statistics.percentile([7.0], 0.99) == 7.0
    assert np.isnan(statistics.percentile([], 0.5))


def test_the_paired_ratio_ignores_what_pairs_share() -> None:
    """A machine that drifts by a factor of ten between pairs leaves a ratio of exactly 1.1."""
    baseline = [1.0, 2.0, 5.0, 10.0, 3.0, 1.5]
    found = statistics.paired_ratio(baseline, [value * 1.1 for value in baseline])
    assert (found.value, found.low, found.high) == pytest.approx((1.1, 1.1, 1.1))
    assert found.count == 6


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    """Over 200 experiments of 8 noisy pairs the 95 % interval covers the true ratio in at least 90 %."""
    draw = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        noise = np.exp(draw.normal(0, 0.05, size=(2, 8)))
        found = statistics.paired_ratio(list(noise[0]), list(noise[1] * 1.2))
        covered += found.low <= 1.2 <= found.high
    assert covered >= 180


def test_the_same_pairs_give_the_same_interval() -> None:
    """Resampling is seeded."""
    first, second = ([1.0, 1.2, 0.9, 1.1, 1.0, 1.3], [1.1, 1.0, 1.0, 1.2, 1.4, 1.2])
    assert statistics.paired_ratio(first, second) == statistics.paired_ratio(first, second)


@pytest.mark.parametrize(
    ("baseline", "candidate"), [([], []), ([1.0], []), ([1.0, 0.0], [1.0, 1.0]), ([1.0], [float("nan")])]
)
def test_what_is_no_pair_is_refused(baseline: list[float], candidate: list[float]) -> None:
    """No pair, one without its other, and figures that have no ratio."""
    with pytest.raises(ValueError, match="pairs"):
        statistics.paired_ratio(baseline, candidate)
