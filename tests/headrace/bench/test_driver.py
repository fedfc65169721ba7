"""Guarantees of the driver and of the figures, in virtual time: exact against a scripted server."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.bench import metrics, steady
from headrace.bench.load.spec import Leg, LoadSpec
from headrace.bench.metrics import Slo
from headrace.bench.records import CANCELLED, OK
from tests.headrace.bench.virtual import Asked, drive

NO_SLO = Slo()


def constant(rate: float, seconds: float, **values: object) -> LoadSpec:
    legs = (Leg(rate, seconds=seconds),)
    return LoadSpec(**({"loop": "open", "legs": legs, "arrivals": "constant", "output": "64"} | values))  # type: ignore[arg-type]


def closed(clients: int, **values: object) -> LoadSpec:
    return LoadSpec(**({"loop": "closed", "legs": (Leg(clients, requests=20),), "output": "4"} | values))  # type: ignore[arg-type]


def eight_at_a_time(_asked: Asked) -> Sequence[tuple[float, int]]:
    return [(0.25, 8), *[(0.04, 8)] * 7]


def test_messages_of_eight_tokens_count_as_eight() -> None:
    """64 tokens in 8 messages 40 ms apart: 5 ms a token, whatever the messages."""
    records, _ = drive(constant(10, 10), eight_at_a_time)
    found = metrics.figures(records, records, NO_SLO)
    assert found["ttft"]["p50"] == pytest.approx(0.25)
    assert found["tpot"]["p50"] == pytest.approx(0.005)
    assert (found["itl"]["p50"], found["itl"]["p99"]) == pytest.approx((0.005, 0.005))
    assert found["itl"]["count"] == 100 * 56
    assert found["message_gap"]["p50"] == pytest.approx(0.04)
    assert found["e2e"]["p50"] == pytest.approx(0.25 + 7 * 0.04)
    assert (found["tokens"]["output"], found["tokens"]["a_message"]) == (6400, 8)


def test_percentiles_are_those_of_the_records() -> None:
    """100 requests whose first token takes 10, 20, ... 1000 ms, in a mixed order."""

    def script(asked: Asked) -> Sequence[tuple[float, int]]:
        return [(0.01 * (1 + asked.conversation.number * 37 % 100), 64)]

    records, _ = drive(constant(10, 10), script)
    found = metrics.figures(records, records, NO_SLO)["ttft"]
    assert [found[name] for name in ("p50", "p90", "p95", "p99", "max")] == pytest.approx([0.5, 0.9, 0.95, 0.99, 1.0])
    assert found["count"] == 100
    assert found["mean"] == pytest.approx(0.505)


def test_too_few_values_state_no_percentile() -> None:
    """Of 50 values nothing lies beyond the P99."""
    found = metrics.distribution([0.001 * value for value in range(50)])
    assert found["p99"] is None
    assert found["p95"] == pytest.approx(0.047)
    assert metrics.distribution([])["p50"] is None


def test_a_stall_of_six_seconds_is_seen_by_a_tenth_of_an_open_loop() -> None:
    """In a minute at a constant rate, 10 % of the requests wait, the first 6 s and the others less and less."""

    def script(asked: Asked) -> Sequence[tuple[float, int]]:
        return [(max(0.0, 36.0 - asked.now) + 0.05 if 30.0 <= asked.now < 36.0 else 0.05, 64)]

    records, _ = drive(constant(20, 60), script)
    waited = [record for record in records if record.ttft_s > 0.051]
    assert len(waited) / len(records) == pytest.approx(0.1, abs=0.002)
    found = metrics.figures(records, records, NO_SLO)["ttft"]
    assert found["max"] == pytest.approx(6.05, abs=0.06)
    assert found["p99"] == pytest.approx(5.45, abs=0.06)
    assert found["p50"] == pytest.approx(0.05)
    assert steady.find([record.ttft_s for record in records], [1] * len(records)).warm_up == 0


def test_a_closed_loop_hides_the_same_stall() -> None:
    """Why the open loop is the default: two clients that wait send nothing meanwhile, so two requests see it."""

    def script(asked: Asked) -> Sequence[tuple[float, int]]:
        return [(max(0.0, 36.0 - asked.now) + 0.05 if 30.0 <= asked.now < 36.0 else 0.05, 4)]

    records, _ = drive(closed(2, legs=(Leg(2, seconds=60.0),)), script)
    assert sum(record.ttft_s > 0.051 for record in records) == 2


def test_latency_counts_from_the_intended_send() -> None:
    """A turn that is due counts from then; both views are given."""
    records, _ = drive(constant(10, 10), eight_at_a_time)
    for record in records:
        record.sent_s += 0.1
    found = metrics.figures(records, records, NO_SLO)
    assert found["ttft"]["p50"] == pytest.approx(0.25)
    assert found["ttft_from_send"]["p50"] == pytest.approx(0.15)


def test_a_closed_loop_keeps_its_clients_busy_and_makes_each_request_once() -> None:
    """20 requests of 1 s with 4 clients: 5 s; request 5 is sent when one of the first four has ended."""
    records, target = drive(closed(4), lambda _asked: [(1.0, 4)])
    assert sorted(asked.conversation.number for asked in target.asked) == list(range(20))
    assert records[-1].ended_s == pytest.approx(5.0)
    assert records[4].intended_s == pytest.approx(1.0)


def test_turns_follow_the_answer_and_carry_the_history() -> None:
    """The second prompt is the first, the answer's own ids, and what is new; it is due after the think time."""
    spec = closed(1, legs=(Leg(1, requests=1),), turns=2, think_s=3.0, prompt="5")
    records, target = drive(spec, lambda _asked: [(1.0, 4)])
    first, second = target.asked
    assert second.token_ids == (*first.token_ids, 0, 1, 2, 3, *second.turn.token_ids)
    assert (records[1].intended_s, records[1].turn) == (pytest.approx(4.0), 1)


def test_a_cancelled_request_has_a_first_token_and_no_end() -> None:
    """It leaves after its tokens, and counts as neither failed nor late."""
    spec = constant(10, 10, cancel_share=1.0)
    records, target = drive(spec, eight_at_a_time)
    assert {record.outcome for record in records} == {CANCELLED}
    assert target.cancelled == 100
    assert all(
        record.received_tokens - 8 < asked.turn.cancel_after <= record.received_tokens
        for record, asked in zip(records, target.asked, strict=True)
    )
    found = metrics.figures(records, records, NO_SLO)
    assert (found["ttft"]["count"], found["e2e"]["count"], found["requests"]["failed"]) == (100, 0, 0)


def test_a_slow_reader_pauses_and_stays_out_of_the_gaps() -> None:
    """Its pauses are its own; its first token counts."""
    spec = constant(10, 10, slow_share=1.0, slow_pause_s=0.5)
    records, _ = drive(spec, eight_at_a_time)
    assert records[0].ended_s - records[0].sent_s >= 8 * 0.5
    found = metrics.figures(records, records, NO_SLO)
    assert (found["ttft"]["count"], found["itl"]["count"], found["e2e"]["count"]) == (100, 0, 0)


def test_a_failed_request_keeps_no_objective_and_ends_its_conversation() -> None:
    """Its error is named, and its later turns are not sent."""
    spec = closed(1, turns=3, legs=(Leg(1, requests=2),))
    records, _ = drive(spec, lambda asked: [(1.0, -1)] if asked.conversation.number == 0 else [(1.0, 4)])
    assert [record.outcome for record in records] == ["Unavailable", OK, OK, OK]
    assert not Slo().met(records[0])
    assert metrics.figures(records, records, Slo())["slo_share"] == 0.75


def test_goodput_counts_what_keeps_every_objective() -> None:
    """Half of the requests are over the limit of the first token."""
    spec = constant(10, 10.05)
    records, _ = drive(spec, lambda asked: [(0.2 if asked.conversation.number % 2 else 0.6, 32), (0.32, 32)])
    found = metrics.figures(records, records, metrics.parse_slo("ttft=500ms,tpot=11ms,e2e=2s"))
    assert found["slo_share"] == pytest.approx(0.5, abs=0.01)
    assert found["goodput_per_s"] == pytest.approx(5.0, rel=0.02)
    assert metrics.figures(records, records, metrics.parse_slo("tpot=9ms"))["slo_share"] == 0


@pytest.mark.parametrize("text", ["", "ttft", "ttft=5", "p99=5s", "ttft=-1s"])
def test_objectives_that_cannot_be_read_are_refused(text: str) -> None:
    """The error shows what was given."""
    with pytest.raises(ValueError, match="--slo"):
        metrics.parse_slo(text)
