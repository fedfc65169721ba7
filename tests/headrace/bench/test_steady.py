"""Guarantees of the steady state: warm-up goes, a stall stays, growth is told."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.bench import steady


def noise(count: int = 200, seed: int = 0) -> list[float]:
    return list(np.exp(np.random.default_rng(seed).normal(np.log(0.05), 0.1, count)))


@pytest.mark.parametrize("seed", range(5))
def test_the_first_eight_slow_requests_are_left_out(seed: int) -> None:
    """Exactly those."""
    values = [0.5] * 8 + noise(seed=seed)
    assert steady.find(values, [64] * len(values)) == steady.Steadiness(8, 0.0)


@pytest.mark.parametrize("seed", range(20))
def test_of_an_even_run_next_to_nothing_is_left_out(seed: int) -> None:
    """At most two requests of 200, by chance."""
    found = steady.find(noise(seed=seed), [64] * 200)
    assert found.warm_up <= 2
    assert not found.problem


def test_long_prompts_at_the_start_are_no_warm_up() -> None:
    """A request is compared with those of its size."""
    sizes = [2048] * 8 + [64] * 150 + [2048] * 42
    values = [value * size / 64 for value, size in zip(noise(), sizes, strict=True)]
    assert steady.find(values, sizes).warm_up <= 2


@pytest.mark.parametrize("at", [10, 50, 100, 150])
def test_a_stall_in_the_middle_is_never_left_out(at: int) -> None:
    """Twenty slow requests after ten usual ones are what the server did."""
    values = noise()
    values[at : at + 20] = [3.0] * 20
    assert steady.find(values, [64] * 200).warm_up <= 2


def test_latency_that_grows_is_not_steady() -> None:
    """An overloaded open loop: twice as slow at the end as at the start; and one that jumps after its first tenth."""
    values = [value * (1 + number / 200) for number, value in enumerate(noise())]
    assert "not steady" in steady.find(values, [64] * 200).problem
    slow = [value * (1 + 0.5 * number / 200) for number, value in enumerate(noise())]
    assert "not steady: latency changes by +" in steady.find(slow, [64] * 200).problem


def test_a_warm_up_without_end_is_not_steady() -> None:
    """Half of the requests are unlike the other half: which is the usual?"""
    values = [value * (10 if number < 100 else 1) for number, value in enumerate(noise())]
    assert "no end of the warm-up" in steady.find(values, [64] * 200).problem


def test_few_requests_are_taken_as_they_are() -> None:
    """Of fewer than twenty nothing can be said."""
    assert steady.find([1.0] * 8 + [0.1] * 8, [1] * 16) == steady.Steadiness(0, 0.0)
