"""Under more interactive load than can be served, the lower classes still have their turn. In virtual time."""

from __future__ import annotations

import pytest

from services.engine.plan import StepPlan
from services.engine.request import FinishReason, Priority, Request
from tests.engine.factories import SymbolicEngine, make_request

SECOND_NS = 1_000_000_000
LOAD_S = 60
OVERLOAD = 1.2
BOUND_S = {Priority.STANDARD: 10, Priority.BATCH: 60}


def _step_ms(plan: StepPlan) -> float:
    """Roughly a small CPU: reading the weights, and a millisecond a token."""
    return 10.0 + plan.token_count


def _engine(profile: str) -> SymbolicEngine:
    shared = 16 if profile == "interactive" else None
    engine = SymbolicEngine(
        block_count=100, max_num_seqs=8, max_num_batched_tokens=64, max_chunk_tokens=64, shared_chunk_tokens=shared
    )
    engine.step_ms = _step_ms
    return engine


def _request(request_id: int, priority: Priority, arrival_ns: int = 0) -> Request:
    prompt = [request_id % 50, *range(request_id % 40)]
    return make_request(request_id, prompt=prompt, max_tokens=20, priority=priority, arrival_ns=arrival_ns)


def _seconds_a_request(profile: str) -> float:
    """Virtual seconds that one request takes of an engine that is never idle."""
    engine = _engine(profile)
    begun = engine.clock()
    for request_id in range(300):
        engine.add(_request(request_id, Priority.INTERACTIVE))
    engine.run(limit=100_000)
    return (engine.clock() - begun) / SECOND_NS / 300


@pytest.mark.parametrize("profile", ["interactive", "throughput"])
def test_every_class_is_served_under_120_percent_of_interactive_load(profile: str) -> None:
    """For 60 s interactive requests arrive faster than they can be served; whoever else came is served in time.

    Every standard and batch request starts within its bound and a second, and ends within five seconds more.
    """
    engine = _engine(profile)
    between_ns = int(_seconds_a_request(profile) / OVERLOAD * SECOND_NS)
    begun = next_ns = engine.clock()
    low: list[Request] = []
    served = serial = 0
    while engine.clock() < begun + (LOAD_S + 15) * SECOND_NS or any(request.finish is None for request in low):
        while next_ns <= engine.clock():  # the load goes on until the last of the others has ended
            serial += 1
            engine.add(_request(serial, Priority.INTERACTIVE, arrival_ns=next_ns))
            next_ns += between_ns
        second = (engine.clock() - begun) // SECOND_NS
        if len(low) < 2 * min(second // 5 + 1, LOAD_S // 5):  # one of each class every five seconds
            priority = Priority.STANDARD if len(low) % 2 else Priority.BATCH
            low.append(engine.add(_request(1_000_000 + len(low), priority)))
        engine.step()
        served = sum(1 for i in engine.ended if i < 1_000_000)
    assert engine.scheduler.roster.waiting_count > 50, "there was no overload"
    assert served > 100
    assert len(low) == 2 * LOAD_S // 5
    for request in low:
        clock = request.clock
        assert request.finish is FinishReason.LENGTH
        assert clock.first_scheduled_ns - clock.arrival_ns <= (BOUND_S[request.priority] + 1) * SECOND_NS
        assert clock.finished_ns - clock.arrival_ns <= (BOUND_S[request.priority] + 6) * SECOND_NS
        engine.check_answer(request)
