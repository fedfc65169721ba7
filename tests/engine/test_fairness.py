"""Keys that share a crowded engine have what their weights say, and who asks for little waits for nobody's flood.

In virtual time.
"""

from __future__ import annotations

import pytest

from services.engine.request import Request
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


def test_a_quiet_key_waits_for_a_place_and_not_for_a_flood() -> None:
    """Under 200 waiting requests of another key, each of its own starts with the next place that is free."""
    engine = _engine()
    for number in range(200):
        engine.add(_request(number, b"flood", 1.0, 20))
    waits_ms = []
    for number in range(1000, 1010):
        for _ in range(15):
            engine.step()
        request = engine.add(_request(number, b"quiet", 1.0, 5))
        places = engine.scheduler.roster.running_count
        begun = engine.clock()
        while not request.output_count:
            engine.step()
            assert engine.scheduler.roster.running_count <= places + 1
        waits_ms.append((engine.clock() - begun) / NANOSECONDS_A_MS)
        assert not any(
            other.clock.first_scheduled_ns > request.clock.arrival_ns
            and other.clock.first_scheduled_ns < request.clock.first_scheduled_ns
            for other in engine.scheduler.roster.running
        )
    assert engine.scheduler.roster.waiting_count > 50
    assert max(waits_ms) < 1000  # in the order of arrival it would be tens of seconds
