"""Guarantees of "where the P99 went"."""

from __future__ import annotations

import pytest

from headrace.bench import attribution
from headrace.bench.records import OK, Record


def record(number: int, prompt_tokens: int, **stages_ms: float) -> Record:
    """One whose server-side stages are these, sent 1 ms late over a connection that takes 2 ms."""
    receipt: dict[str, int | str] = {f"{name}_ns": int(value * 1e6) for name, value in stages_ms.items()}
    receipt["time_to_first_token_ns"] = int(sum(stages_ms.values()) * 1e6)
    sent_s = number + 0.001
    first_s = sent_s + sum(stages_ms.values()) / 1e3 + 0.002
    return Record(
        number,
        intended_s=float(number),
        sent_s=sent_s,
        ended_s=first_s,
        messages=[(first_s, 1)],
        outcome=OK,
        prompt_tokens=prompt_tokens,
        trace_id=f"{number:032x}",
        receipt=receipt,
    )


def test_the_slowest_are_explained_by_their_stages() -> None:
    """Two of 200 waited 500 ms in the engine's queue; all else is alike, and all of it adds up."""
    made = [record(number, 100, queue=500 if number >= 198 else 1, prefill=20) for number in range(200)]
    found = attribution.explain(made)
    assert attribution.largest(found["all"]) == "queue"
    assert found["all"]["tail_s"]["queue"] == pytest.approx(0.5)
    assert found["all"]["middle_s"]["queue"] == pytest.approx(0.001)
    assert found["all"]["tail_s"]["send_lag"] == pytest.approx(0.001)
    assert found["all"]["tail_s"]["connection"] == pytest.approx(0.002)
    assert sum(found["all"]["tail_s"].values()) == pytest.approx(0.523)
    assert {one["trace_id"] for one in found["slowest"][:2]} == {f"{198:032x}", f"{199:032x}"}


def test_each_length_has_its_own_reason() -> None:
    """Short prompts wait in the queue, long ones in prefill; buckets hold the upper bound."""
    short = [record(number, 128, queue=300 if number == 0 else 1, prefill=5) for number in range(100)]
    long = [record(100 + number, 129, queue=1, prefill=900 if number == 0 else 90) for number in range(100)]
    found = attribution.explain(short + long)["by_prompt"]
    assert {name: attribution.largest(one) for name, one in found.items()} == {"<=128": "queue", "<=256": "prefill"}
    assert [one["count"] for one in found.values()] == [100, 100]


def test_nothing_is_explained_by_nothing() -> None:
    """A run without receipts has no stages."""
    assert attribution.largest(attribution.explain([])["all"]) == ""
