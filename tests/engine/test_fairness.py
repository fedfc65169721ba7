"""Keys that share a crowded engine have what their weights say, and who asks for little waits for nobody's flood.

In virtual time.
"""

from __future__ import annotations

import pytest

from services.engine.request import Priority, Request
from tests.engine.factories import SymbolicEngine, make_request

NANOSECONDS_A_MS = 1_000_000


def _engine() -> SymbolicEngine:
    engine = SymbolicEngine(
        block_count=200, max_num_seqs=8, max_num_batched_tokens=64, max_chunk_tokens=64, shared_chunk_tokens=16
    )
    engine.step_ms = lambda plan: 10.0 + plan.token_count
    return engine


def _request(request_id: int, key: bytes, weight: float, max_tokens: int) -> Request:
    prompt = [request_id % 50, request_id // 50 % 50, *range(18)]
    return make_request(request_id, prompt=prompt, max_tokens=max_tokens, fair_key=key, fair_weight=weight)


@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("length", [20, 60], ids=["alike", "longer answers"])
def test_tokens_follow_weights(weight: float, length: int) -> None:
    """Two keys with 150 requests each, whatever the length of their answers: within 15 % after 400 steps."""
    engine, keys = _engine(), {b"a": (weight, 20), b"b": (1.0, length)}
    requests = []
    for number in range(300):
        key = b"ab"[number % 2 :][:1]
        requests.append(engine.add(_request(number, key, *keys[key])))
    for _ in range(400):
        engine.step()
    assert engine.scheduler.roster.waiting_count > 50
    given = dict.fromkeys(keys, 0)
    for request in requests:
        given[request.fair_key] += request.computed_count
    assert given[b"a"] / given[b"b"] == pytest.approx(weight, rel=0.15)


def test_a_quiet_key_does_not_wait_for_a_flood() -> None:
    """Under 200 waiting requests of another key, each of its own starts in the next step; at most one more runs."""
    engine = _engine()
    for number in range(200):
        engine.add(_request(number, b"flood", 1.0, 20))
    waits_ms = []
    for number in range(1000, 1010):
        for _ in range(15):
            engine.step()
        request = engine.add(_request(number, b"quiet", 1.0, 5))
        begun = engine.clock()
        while not request.output_count:
            engine.step()
            assert engine.scheduler.roster.running_count <= 9
        assert request.clock.first_scheduled_ns == request.clock.arrival_ns
        waits_ms.append((engine.clock() - begun) / NANOSECONDS_A_MS)
        assert not any(
            other.clock.first_scheduled_ns > request.clock.arrival_ns
            and other.clock.first_scheduled_ns < request.clock.first_scheduled_ns
            for other in engine.scheduler.roster.running
        )
    assert engine.scheduler.roster.waiting_count > 50
    assert max(waits_ms) < 200  # in the order of arrival it would be tens of seconds


@pytest.mark.parametrize("chunk", [16, None], ids=["interactive", "throughput"])
def test_a_key_that_has_no_place_gets_one_at_once(chunk: int | None) -> None:
    """It waits for no answer of another key to end; all that run go on, by turns, in steps no larger than before."""
    engine = SymbolicEngine(
        block_count=800, max_num_seqs=8, max_num_batched_tokens=64, max_chunk_tokens=64, shared_chunk_tokens=chunk
    )
    flood = [engine.add(_request(number, b"flood", 1.0, 200)) for number in range(40)]
    for _ in range(20):
        engine.step()
    running = engine.scheduler.roster.running
    assert len(running) == 8
    for number, length in ((1000, 20), (1001, 300)):
        prompt = [number % 50] * length
        quiet = engine.add(make_request(number, prompt=prompt, max_tokens=4, fair_key=b"quiet"))
        also = engine.add(make_request(number + 100, prompt=prompt, max_tokens=4, fair_key=b"quiet"))
        before = {request.request_id: request.output_count for request in running}
        step_count = engine.scheduler.counters.step_count
        while not quiet.output_count:
            assert len(engine.step().requests) <= 8
            assert engine.scheduler.roster.running_count <= 9
        taken = engine.scheduler.counters.step_count - step_count
        assert taken <= -(-length // (chunk or 64 - 8)) + 1
        assert quiet.clock.first_scheduled_ns == quiet.clock.arrival_ns
        assert not also.output_count
        gains = [one.output_count - before[one.request_id] for one in running]
        assert min(gains) >= taken * 7 // 8 - 1
        while also.request_id not in engine.ended:
            engine.step()
    assert not any(request.clock.preemption_count for request in flood)


def test_guests_are_bounded() -> None:
    """However many keys come, at most twice the sequences of a step run; where each has one there is no guest."""
    engine = SymbolicEngine(block_count=400, max_num_seqs=4, max_num_batched_tokens=64, max_chunk_tokens=64)
    for number in range(30):
        engine.add(_request(number, b"flood", 1.0, 300))
    engine.step()
    for number in range(100, 130):
        engine.add(_request(number, b"key %d" % number, 1.0, 300))
    for _ in range(30):
        engine.step()
        assert engine.scheduler.roster.running_count <= 8
    assert engine.scheduler.roster.running_count == 8


def test_a_guest_is_of_no_lower_class() -> None:
    """Where all that run are of a higher class, it waits for a place as before."""
    engine = SymbolicEngine(block_count=400, max_num_seqs=4, max_num_batched_tokens=64, max_chunk_tokens=64)
    for number in range(4):
        engine.add(make_request(number, max_tokens=50, fair_key=b"flood", priority=Priority.INTERACTIVE))
    engine.step()
    late = engine.add(make_request(9, max_tokens=5, fair_key=b"quiet", priority=Priority.BATCH))
    for _ in range(10):
        engine.step()
    assert not late.clock.first_scheduled_ns
    engine.run()
    assert late.output_count == 5
