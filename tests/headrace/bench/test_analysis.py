"""Guarantees of a soak's slopes: what grows is told, what is flat or merely fills is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from headrace.bench import analysis, tables
from headrace.bench.analysis import Evidence
from headrace.bench.load.spec import Leg, LoadSpec
from headrace.bench.metrics import Slo
from tests.headrace.bench import runs
from tests.headrace.bench.virtual import Asked, drive

SECONDS = 400
LEAK_BYTES = 64 * 1024  # a second, of half a gigabyte


def soak(seconds: float = SECONDS) -> dict[str, Any]:
    """A noisy server whose engine leaks, whose stream process does not, and whose prefix cache fills."""
    draw = np.random.default_rng(1)

    def script(_asked: Asked) -> list[tuple[float, int]]:
        return [(0.1 * float(np.exp(draw.normal(0, 0.1))), 8)]

    records, _ = drive(LoadSpec("open", (Leg(2.0, seconds),), prompt="8", output="8"), script)
    samples = []
    for second in range(int(seconds)):
        used, noise = int(draw.integers(0, 4)), int(draw.integers(0, 1 << 20))
        engine = {
            "kv_total_block_count": 1000,
            "kv_cached_block_count": 2 * second,
            "kv_free_block_count": 1000 - 2 * second - used,
            "open_stream_count": used,
        }
        # The tokenizer grows, too, beyond chance, but by a thousandth.
        memory = {
            "engine": (1 << 29) + LEAK_BYTES * second + noise,
            "stream": (1 << 27) + noise,
            "tokenizer": (1 << 27) + 300 * second,
        }
        samples.append({"at_s": float(second), "engine": engine, "rss_bytes": memory})
    return analysis.report(
        LoadSpec("open", (Leg(2.0, seconds),), prompt="8", output="8"), Evidence(records, [runs.IDLE], samples), Slo()
    )


def changes(an_hour: Mapping[str, Mapping[str, Any]]) -> set[str]:
    return {name for name, one in an_hour.items() if one["changes"]}


def test_a_leak_is_told_and_nothing_else() -> None:
    """With its size an hour; blocks that the prefix cache took are not lost."""
    report = soak()
    assert changes(report["slopes_an_hour"]) == {"rss_bytes engine"}
    assert report["slopes_an_hour"]["rss_bytes engine"]["value"] == pytest.approx(3600 * LEAK_BYTES, rel=0.1)
    (table,) = tables.of_invalid_run(report)
    told = {row[0]: row[-1] for row in table.rows}
    assert told == {
        "memory, MiB, engine": "yes",
        "memory, MiB, stream": "no",
        "memory, MiB, tokenizer": "no",
        "open streams": "no",
        "KV blocks in use": "no",
    }
    assert "e2e, ms" in {row[0] for row in tables.slopes(report["slopes_an_hour"]).rows}


def test_a_short_run_says_nothing_of_an_hour() -> None:
    """Below five minutes a slope is the machine's mood."""
    assert soak(analysis.SHORTEST_S - 10)["slopes_an_hour"] == {}
