"""Guarantees of the scheduler, in virtual time and without tensors.

Every answer is compared with the symbolic model's answer to the same request alone.
"""

from __future__ import annotations

import pytest

from services.engine.request import FinishReason, Priority, QueueReason, RequestStatus
from tests.engine.factories import SymbolicEngine, make_request

SECOND_MS = 1000


def test_a_prompt_is_computed_in_chunks_under_the_budget() -> None:
    """A 40-token prompt takes three steps of 16, 16 and 8 tokens, then one token a step."""
    engine = SymbolicEngine()
    request = engine.add(make_request(prompt=range(40), max_tokens=3))
    steps = engine.run()
    assert [step.plan.token_count for step in steps] == [16, 16, 8, 1, 1]
    assert request.clock.prefill_chunk_count == 3
    assert request.clock.step_count == 5
    engine.check_answer(request)


def test_decodes_go_first_and_a_long_prompt_takes_what_is_left() -> None:
    """A running stream gets its token in every step that carries another's prompt."""
    engine = SymbolicEngine(block_count=64)
    stream = engine.add(make_request(1, prompt=range(4), max_tokens=20))
    engine.step()
    long = engine.add(make_request(2, prompt=range(100), max_tokens=1))
    before = stream.output_count
    while long.finish is None:
        step = engine.step()
        assert step is not None
        assert stream in step.requests
        before += 1
        assert stream.output_count == before
    assert stream.clock.stalled_ns > 0


def test_the_chunk_cap_leaves_budget_for_others() -> None:
    """With a cap of 8, two prompts are prefilled in one step of 16."""
    engine = SymbolicEngine(max_chunk_tokens=8)
    engine.add(make_request(1, prompt=range(20)))
    engine.add(make_request(2, prompt=range(1, 20)))
    step = engine.step()
    assert step is not None
    assert step.counts == [8, 8]


def test_slots_bound_the_batch_and_say_why_others_wait() -> None:
    """A fifth request waits for a slot, then runs."""
    engine = SymbolicEngine()
    requests = [engine.add(make_request(i, prompt=[i, 1], max_tokens=4)) for i in range(5)]
    engine.step()
    assert [r.status for r in requests].count(RequestStatus.RUNNING) == 4
    assert requests[4].clock.queue_reason is QueueReason.SLOTS
    engine.run()
    for request in requests:
        engine.check_answer(request)
        assert request.finish is FinishReason.LENGTH


def test_interactive_goes_before_standard_before_batch() -> None:
    """Class decides among requests that have not waited too long."""
    engine = SymbolicEngine(max_num_seqs=1)
    order = (Priority.BATCH, Priority.STANDARD, Priority.INTERACTIVE)
    requests = [engine.add(make_request(i, prompt=[i], priority=p)) for i, p in enumerate(order)]
    engine.run()
    starts = [request.clock.first_scheduled_ns for request in requests]
    assert starts == sorted(starts, reverse=True)


def test_short_work_goes_first_and_everything_ages() -> None:
    """Inside a class the short prompt starts first, but a long one that has waited is not overtaken for ever."""
    engine = SymbolicEngine(max_num_seqs=1)
    long = engine.add(make_request(1, prompt=range(40), max_tokens=1))
    short = engine.add(make_request(2, prompt=[3], max_tokens=1))
    engine.run()
    assert short.clock.first_scheduled_ns < long.clock.first_scheduled_ns
    engine = SymbolicEngine(max_num_seqs=1)
    long = engine.add(make_request(1, prompt=range(40), max_tokens=1))
    engine.clock.advance_ms(100)
    short = engine.add(make_request(2, prompt=[3], max_tokens=1))
    engine.run()
    assert long.clock.first_scheduled_ns < short.clock.first_scheduled_ns


@pytest.mark.parametrize(("priority", "bound_s"), [(Priority.STANDARD, 10), (Priority.BATCH, 60)])
def test_waiting_is_bounded(priority: Priority, bound_s: int) -> None:
    """Under endless interactive work a lower class starts within its bound and is preempted last."""
    engine = SymbolicEngine(max_num_seqs=1, block_count=64)
    low = engine.add(make_request(0, prompt=[1, 2], priority=priority))
    serial = 0
    while low.clock.first_scheduled_ns == 0:
        serial += 1
        assert serial < 2000
        engine.add(make_request(serial, prompt=[3], max_tokens=1, priority=Priority.INTERACTIVE))
        engine.step()
        engine.clock.advance_ms(100)
    waited_s = (low.clock.first_scheduled_ns - low.clock.arrival_ns) / 1e9
    assert bound_s <= waited_s < bound_s + 1
    assert low.protected


def test_preempted_requests_lose_no_token_and_end_like_alone() -> None:
    """Eight requests that cannot all fit are preempted, boundedly, and answered as alone."""
    engine = SymbolicEngine(block_count=14, max_num_seqs=8)
    requests = [engine.add(make_request(i, prompt=[i] * 5, max_tokens=36)) for i in range(8)]
    engine.run()
    assert engine.scheduler.roster.preemption_count > 0
    for request in requests:
        engine.check_answer(request)
        assert request.output_count == 36
        assert request.clock.preemption_count <= engine.config.max_preemptions
    preempted = [r for r in requests if r.clock.preemption_count]
    assert all(r.clock.preempted_ns > 0 for r in preempted)
    assert engine.pool.used_count == 0


def test_the_oldest_request_is_never_preempted() -> None:
    """At least one request always advances."""
    engine = SymbolicEngine(block_count=14, max_num_seqs=8)
    requests = []
    for i in range(8):
        requests.append(engine.add(make_request(i, prompt=[i] * 5, max_tokens=36)))
        engine.clock.advance_ms(1)
        engine.step()
    engine.run()
    assert engine.scheduler.roster.preemption_count > 0
    assert requests[0].clock.preemption_count == 0


def test_no_admission_in_a_step_that_preempts() -> None:
    """A preempted request is not started again in the same step."""
    engine = SymbolicEngine(block_count=8)
    first = engine.add(make_request(1, prompt=range(11), max_tokens=20))
    second = engine.add(make_request(2, prompt=range(20, 31), max_tokens=20))
    while not engine.scheduler.roster.preemption_count:
        step = engine.step()
    assert step is not None
    assert step.requests == [first]
    assert second.status is RequestStatus.WAITING


def test_the_watermark_holds_back_all_but_an_only_request() -> None:
    """With 20 blocks a second prompt may not push past 17; a prompt of 19 blocks alone may run."""
    engine = SymbolicEngine(block_count=20, prefix_cache=False)
    engine.add(make_request(1, prompt=range(32), max_tokens=8))
    held = engine.add(make_request(2, prompt=range(40), max_tokens=8))
    engine.step()
    engine.step()
    engine.step()
    assert held.status is RequestStatus.WAITING
    assert held.clock.queue_reason is QueueReason.KV
    engine.run()
    alone = engine.add(make_request(3, prompt=range(76), max_tokens=4))
    engine.run()
    engine.check_answer(alone)
    engine.check_answer(held)


def test_a_request_without_credits_pauses_and_resumes_exactly() -> None:
    """Tokens stop at the limit, others go on, and after a grant none is missing or doubled."""
    engine = SymbolicEngine()
    slow = engine.add(make_request(1, prompt=[1, 2], max_tokens=10, credit_limit=3))
    other = engine.add(make_request(2, prompt=[3, 4], max_tokens=10))
    engine.run()
    assert slow.output_count == 3
    assert other.finish is FinishReason.LENGTH
    assert (engine.scheduler.roster.paused_count, engine.scheduler.roster.running_count) == (1, 0)
    engine.clock.advance_ms(500)
    engine.grant(1, 2)
    engine.run()
    assert slow.output_count == 5
    engine.grant(1, 100)
    engine.run()
    engine.check_answer(slow)
    assert slow.finish is FinishReason.LENGTH
    assert slow.clock.paused_ns >= 500_000_000


def test_a_request_that_arrives_without_credits_is_not_prefilled() -> None:
    """It waits for credits, and says so."""
    engine = SymbolicEngine()
    request = engine.add(make_request(credit_limit=0))
    assert not engine.scheduler.roster.runnable
    assert request.clock.queue_reason is QueueReason.CREDITS
    assert engine.step() is None
    engine.grant(1, 100)
    engine.run()
    engine.check_answer(request)


def test_paused_requests_do_not_hold_slots_or_blocks_from_others() -> None:
    """Readers that stopped cannot fill the batch, and their blocks are taken when others need them."""
    engine = SymbolicEngine(block_count=12, max_num_seqs=2)
    paused = [engine.add(make_request(i, prompt=[i] * 12, max_tokens=9, credit_limit=1)) for i in range(3)]
    engine.run()
    assert engine.scheduler.roster.paused_count == 3
    big = engine.add(make_request(9, prompt=range(40), max_tokens=4))
    engine.run()
    engine.check_answer(big)
    for request in paused:
        engine.grant(request.request_id, 100)
    engine.run()
    for request in paused:
        engine.check_answer(request)
        assert request.output_count == 9


def test_an_expired_waiting_request_is_never_prefilled() -> None:
    """Its deadline ends it in the queue; the prefill counter does not move."""
    engine = SymbolicEngine(max_num_seqs=1)
    engine.add(make_request(1, prompt=[1], max_tokens=30))
    late = engine.add(make_request(2, prompt=range(30), deadline_ns=engine.clock() + 5_000_000))
    engine.step()
    prefilled = engine.scheduler.counters.prefilled_token_count
    engine.run()
    assert late.finish is FinishReason.DEADLINE_EXCEEDED
    assert engine.scheduler.counters.prefilled_token_count == prefilled
    assert late.output_count == 0


def test_a_deadline_ends_a_running_request_and_keeps_its_tokens() -> None:
    """Running or paused, it ends at the next step; blocks go back."""
    engine = SymbolicEngine()
    deadline_ns = engine.clock() + 6_000_000
    running = engine.add(make_request(1, prompt=[1, 2], max_tokens=90, deadline_ns=deadline_ns))
    paused = engine.add(make_request(2, prompt=[3], max_tokens=90, deadline_ns=deadline_ns, credit_limit=2))
    assert engine.scheduler.roster.next_deadline_ns == deadline_ns
    engine.run()
    assert running.finish is FinishReason.DEADLINE_EXCEEDED
    assert paused.finish is FinishReason.DEADLINE_EXCEEDED
    assert running.output_count > 2
    engine.check_answer(running)
    assert engine.pool.used_count == 0
    assert engine.scheduler.roster.next_deadline_ns is None


def test_abort_works_in_every_state_once() -> None:
    """Waiting, prefilling, decoding, paused, preempted: one ending, blocks back, later aborts are no-ops."""
    engine = SymbolicEngine(max_num_seqs=2, block_count=40)
    decoding = engine.add(make_request(1, prompt=[1], max_tokens=50))
    paused = engine.add(make_request(2, prompt=[2], max_tokens=50, credit_limit=1))
    engine.step()
    prefilling = engine.add(make_request(3, prompt=range(60)))
    engine.step()
    waiting = engine.add(make_request(4, prompt=[4]))
    engine.step()
    assert waiting.status is RequestStatus.WAITING
    assert prefilling.computed_count < prefilling.token_count
    for request in (decoding, paused, prefilling, waiting):
        assert engine.abort(request.request_id)
        assert not engine.abort(request.request_id)
        engine.scheduler.roster.check_integrity()
    engine.step()
    assert set(engine.ended) == {1, 2, 3, 4}
    assert {r.finish for r in engine.ended.values()} == {FinishReason.CANCELLED}
    assert engine.pool.used_count == 0
    assert not engine.scheduler.roster.has_requests
    assert not engine.abort(99)


def test_identical_prompts_share_blocks_and_answers() -> None:
    """The second of two equal prompts is found in the cache but for its last token's block."""
    engine = SymbolicEngine()
    first = engine.add(make_request(1, prompt=range(12), max_tokens=4))
    engine.run()
    second = engine.add(make_request(2, prompt=range(12), max_tokens=4))
    engine.run()
    assert second.clock.cached_token_count == 8
    assert first.output_ids.tolist() == second.output_ids.tolist()
    engine.check_answer(second)


def test_identical_prompts_that_arrive_together_are_computed_once() -> None:
    """Four equal prompts of 30 tokens: the first computes, the others wait for its blocks and reuse them."""
    engine = SymbolicEngine(block_count=64)
    requests = [engine.add(make_request(i, prompt=range(30), max_tokens=5)) for i in range(4)]
    engine.run()
    assert sorted(r.clock.cached_token_count for r in requests) == [0, 28, 28, 28]
    assert engine.scheduler.counters.prefilled_token_count == 30 + 3 * 2
    for request in requests:
        engine.check_answer(request)


def test_another_salt_shares_nothing() -> None:
    """Blocks are found only under the salt that they were computed under."""
    engine = SymbolicEngine()
    engine.add(make_request(1, prompt=range(12), cache_salt=b"a"))
    engine.run()
    other = engine.add(make_request(2, prompt=range(12), cache_salt=b"b"))
    engine.run()
    assert other.clock.cached_token_count == 0
