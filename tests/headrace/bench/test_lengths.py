"""Guarantees of the length distributions."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from headrace.bench.load import lengths
from headrace.bench.load.lengths import BadLoad


def drawn(text: str, count: int = 20_000) -> np.ndarray:
    one = lengths.parse(text, "--prompt")
    draw = random.Random(0)
    return np.array([one.at(draw.random()) for _ in range(count)])


def test_a_mixture_has_its_shares_and_stays_in_its_ranges() -> None:
    """70 % short, 20 % middle, 10 % long; both ends of a range occur; nothing lies between the ranges."""
    found = drawn("70:32-128,20:256-512,10:1024-1536")
    for share, low, high in ((0.7, 32, 128), (0.2, 256, 512), (0.1, 1024, 1536)):
        inside = (found >= low) & (found <= high)
        assert inside.mean() == pytest.approx(share, abs=0.01)
    assert {32, 128} <= set(found.tolist())
    assert not ((found > 128) & (found < 256)).any()


def test_one_number_is_every_length() -> None:
    """`64` is always 64 tokens."""
    assert set(drawn("64", 100).tolist()) == {64}


def test_a_lognormal_has_its_median_and_its_bounds() -> None:
    """Cut at both ends."""
    found = drawn("lognormal:200,1,20-1000")
    assert np.median(found) == pytest.approx(200, rel=0.03)
    assert (found.min(), found.max()) == (20, 1000)


def test_a_zipf_falls_with_its_exponent() -> None:
    """With exponent 1 the shortest length comes twice as often as the next."""
    found = drawn("zipf:1,10-100", 100_000)
    counts = np.bincount(found)
    assert counts[10] / counts[11] == pytest.approx(2, rel=0.05)
    assert (found.min(), found.max()) == (10, 100)


def test_an_empirical_distribution_is_that_of_its_file(tmp_path: Path) -> None:
    """Lines of length and share up to it."""
    file = tmp_path / "cdf.csv"
    file.write_text("# length, share\n16,0.25\n64,0.75\n512,1\n", encoding="utf-8")
    found = drawn(f"cdf:{file}")
    assert [np.mean(found == length) for length in (16, 64, 512)] == pytest.approx([0.25, 0.5, 0.25], abs=0.01)


@pytest.mark.parametrize("correlation", [-0.8, 0.0, 0.8])
def test_correlated_draws_keep_their_distribution(correlation: float) -> None:
    """The second number stays uniform, and its rank follows the first as asked."""
    draw = random.Random(1)
    pairs = np.array([lengths.correlated(draw.random(), draw.random(), correlation) for _ in range(5_000)])
    assert np.quantile(pairs[:, 1], [0.1, 0.5, 0.9]) == pytest.approx([0.1, 0.5, 0.9], abs=0.02)
    assert np.corrcoef(pairs.T)[0, 1] == pytest.approx(correlation, abs=0.04)


@pytest.mark.parametrize(
    "text", ["", "0", "-3", "9-3", "x:3-4", "0:3-4", "lognormal:0,1,1-2", "lognormal:5,1", "zipf:1", "cdf:/not/there"]
)
def test_what_is_no_distribution_is_refused_by_option_and_value(text: str) -> None:
    """The error names both."""
    with pytest.raises(BadLoad, match="--prompt") as refused:
        lengths.parse(text, "--prompt")
    assert text.removeprefix("cdf:") in str(refused.value)


@pytest.mark.parametrize("lines", ["", "16,0.5\n8,1\n", "16,0.5\n32,0.4\n", "16,0.9\n", "16;1\n"])
def test_a_file_that_is_no_distribution_is_refused(lines: str, tmp_path: Path) -> None:
    """Empty, not rising, not reaching 1, or of another format."""
    file = tmp_path / "cdf.csv"
    file.write_text(lines, encoding="utf-8")
    with pytest.raises(BadLoad, match="--output"):
        lengths.parse(f"cdf:{file}", "--output")
