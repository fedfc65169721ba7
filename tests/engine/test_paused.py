"""What readers that have stopped may keep: a share of the pool a tenant; the longest paused lose theirs first."""

from __future__ import annotations

from services.engine.request import Request, RequestStatus
from tests.engine.factories import SymbolicEngine, make_request


def _paused(engine: SymbolicEngine, request_id: int, salt: bytes, length: int = 12) -> Request:
    """A request that pauses after its first token, holding length / 4 + 1 blocks at most."""
    prompt = [request_id * 20 + i for i in range(length)]
    request = engine.add(make_request(request_id, prompt=prompt, max_tokens=9, credit_limit=1, cache_salt=salt))
    engine.run()
    engine.clock.advance_ms(1)
    assert request.paused
    return request


def test_over_the_cap_the_longest_paused_are_preempted_first() -> None:
    """A quarter of 48 blocks: a fifth request of 3 blocks costs the first its own; others' salts are not touched."""
    engine = SymbolicEngine(block_count=48, paused_kv_share=0.25)
    other = _paused(engine, 9, b"other")
    mine = [_paused(engine, i, b"mine") for i in range(1, 5)]
    engine.step()
    assert all(request.status is RequestStatus.RUNNING for request in (other, *mine))
    mine.append(_paused(engine, 5, b"mine"))
    engine.step()
    states = [request.status for request in mine]
    assert states == [RequestStatus.WAITING, *[RequestStatus.RUNNING] * 4]
    assert other.status is RequestStatus.RUNNING
    for request in (other, *mine):
        engine.grant(request.request_id, 100)
    engine.run()
    for request in (other, *mine):
        engine.check_answer(request)
        assert request.output_count == 9


def test_a_shared_prefix_counts_once() -> None:
    """Six paused requests on one prompt hold little more than one."""
    engine = SymbolicEngine(block_count=24, paused_kv_share=0.5)
    prompt = list(range(32))
    requests = [engine.add(make_request(i, prompt=prompt, max_tokens=9, credit_limit=1)) for i in range(5)]
    engine.run()
    engine.step()
    assert sum(len(request.block_table) for request in requests) > 24
    assert all(request.status is RequestStatus.RUNNING for request in requests)


def test_requests_that_run_are_not_counted() -> None:
    """The cap is about readers that have stopped; a running request may hold the whole pool."""
    engine = SymbolicEngine(block_count=24, paused_kv_share=0.1)
    request = engine.add(make_request(1, prompt=range(60), max_tokens=30))
    engine.run()
    assert request.clock.preemption_count == 0
    engine.check_answer(request)
