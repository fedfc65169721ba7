"""Guarantees of the bench of tracing: a verdict needs figures that are sure, and spans that were really exported."""

from __future__ import annotations

import pytest

from headrace.bench.tracing_report import Measured, costs_of, judge, lines_of

ROUNDS = 30
REAL_CPU_MS = 80.0


def measured(speed: float, first_ms: float, cpu_ms: float, spread: float = 0.001) -> Measured:
    """Rounds that scatter evenly around a throughput and a time to the first token, each by a share of it."""
    around = [1 + spread * (2 * number / (ROUNDS - 1) - 1) for number in range(ROUNDS)]
    return Measured([speed * x for x in around[::-1]], [first_ms * x for x in around], [cpu_ms] * ROUNDS)


@pytest.mark.parametrize(
    ("traced", "cpu_ms", "dropped", "said", "kept"),
    [
        (measured(99.5, 30.2, 0), 6.0, 0, "100 %: within 2 % of throughput and 1 ms to the first token", True),
        (measured(99.5, 30.2, 0, spread=0.03), 5.8, 0, "within", True),  # the clock cannot tell, processor time can
        (measured(99.5, 30.2, 0, spread=0.03), 6.59, 0, "within", True),
        (measured(97.0, 30.2, 0), 5.8, 0, "over", False),
        (measured(99.5, 30.2, 0), 6.7, 0, "over", False),
        (measured(99.5, 31.5, 0), 5.8, 0, "over", False),
        (measured(99.5, 30.2, 0, spread=0.2), 5.8, 0, "too noisy to tell from", False),  # the first token
        (measured(99.5, 30.2, 0), 5.8, 3, "3 spans were dropped", False),
    ],
)
def test_the_verdict_is_of_the_intervals(traced: Measured, cpu_ms: float, dropped: int, said: str, kept: bool) -> None:
    """Cheap and sure: within. Dear and sure: over. Else no pass, and neither where spans were lost on the way."""
    real = {"off": measured(100.0, 30.0, REAL_CPU_MS, spread=0.0), "100 %": traced}
    null = {"off": measured(900.0, 2.0, 5.0), "100 %": measured(850.0, 2.1, cpu_ms)}
    lines, passed = judge(costs_of(real, null), dropped)
    assert said in " ".join(lines)
    assert passed is kept
    assert len(lines_of("real engine", real)) == 4
