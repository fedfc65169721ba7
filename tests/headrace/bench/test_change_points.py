"""Guarantees of the change points."""

from __future__ import annotations

import numpy as np

from headrace.bench import change_points


def noise(count: int, level: float, seed: int) -> list[float]:
    return list(level + np.random.default_rng(seed).normal(0, 0.02, count))


def test_changes_are_found_where_they_are() -> None:
    """Up by 10 %, and back; to within one run."""
    found = change_points.find([*noise(15, 1.0, 0), *noise(15, 1.1, 1), *noise(15, 1.0, 2)])
    assert len(found) == 2
    assert abs(found[0] - 15) <= 1
    assert abs(found[1] - 30) <= 1


def test_an_even_series_has_none_and_neither_has_one_odd_run() -> None:
    """In at least 19 of 20 series of 40."""
    assert sum(bool(change_points.find(noise(40, 1.0, seed))) for seed in range(20)) <= 1
    assert change_points.find([*noise(10, 1.0, 0), 9.0, *noise(10, 1.0, 1)]) == []


def test_few_runs_tell_nothing() -> None:
    """Four on each side are the fewest."""
    assert change_points.find([1.0] * 3 + [2.0] * 4) == []
