"""Hypothesis looks for a life of the scheduler, on 24 blocks, that breaks it; what it finds it shrinks.

Integrity is checked after every step, inside ``SymbolicEngine.step``; every answer is compared with what the request
gets alone. The symbolic model fails at once when a slot is read that was freed or overwritten.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from services.engine.request import FinishReason, PreemptReason, Priority, Request, SamplingParams
from tests.engine.factories import SymbolicEngine, make_request

OPERATIONS = 10_000
LONGEST = 97  # 24 blocks of 4 hold the KV of 97 tokens, the last of which needs none
done: Counter[str] = Counter()

PROMPTS = [[(17 * a + b * b * (a + 1)) % 50 for b in range(40)] for a in range(4)]


class SchedulerLife(RuleBasedStateMachine):
    """Anything that callers, readers, the clock and other requests can do to a request."""

    @initialize(
        seqs=st.integers(1, 6),
        chunk=st.integers(1, 16),
        shared=st.one_of(st.none(), st.integers(1, 8)),
        guesses=st.sampled_from([None, 0, 1, 4, 12]),
    )
    def begin(self, seqs: int, chunk: int, shared: int | None, guesses: int | None) -> None:
        self.engine = SymbolicEngine(
            block_count=24,
            ahead=guesses is None,
            num_speculative_tokens=guesses or 0,
            max_num_seqs=seqs,
            max_chunk_tokens=chunk,
            shared_chunk_tokens=shared,
            paused_grace_ns=5_000_000,
            paused_kv_share=0.3,
        )
        self.live: dict[int, Request] = {}
        self.added = 0

    def pick(self, index: int) -> int:
        return sorted(self.live)[index % len(self.live)]

    def settle(self, operation: str) -> None:
        done[operation] += 1
        self.live = {i: r for i, r in self.live.items() if r.finish is None}

    @precondition(lambda self: len(self.live) < 14)
    @rule(
        prompt=st.sampled_from(PROMPTS),
        length=st.integers(1, 40),
        tokens=st.integers(1, 57),
        priority=st.sampled_from(Priority),
        salt=st.sampled_from([b"", b"tenant"]),
        credits_=st.sampled_from([0, 1, 5, 1000]),
        deadline_ms=st.one_of(st.none(), st.integers(1, 200)),
        explained=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        length: int,
        tokens: int,
        priority: Priority,
        salt: bytes,
        credits_: int,
        deadline_ms: int | None,
        explained: bool,
    ) -> None:
        self.added += 1
        self.live[self.added] = self.engine.add(
            make_request(
                self.added,
                prompt=prompt[:length],
                max_tokens=min(tokens, LONGEST - length),
                priority=priority,
                cache_salt=salt,
                credit_limit=credits_,
                deadline_ns=None if deadline_ms is None else self.engine.clock() + deadline_ms * 1_000_000,
                sampling=SamplingParams(temperature=0.0, prompt_logprobs=0 if explained else None),
            )
        )
        self.settle("add")

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 13))
    def abort(self, index: int) -> None:
        request_id = self.pick(index)
        assert self.engine.abort(request_id)
        assert not self.engine.abort(request_id)
        self.settle("abort")

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 13), tokens=st.integers(1, 8))
    def resume(self, index: int, tokens: int) -> None:
        self.engine.grant(self.pick(index), tokens)
        self.settle("resume")

    @precondition(lambda self: self.engine.scheduler.roster.running)
    @rule(index=st.integers(0, 5))
    def preempt(self, index: int) -> None:
        running = self.engine.scheduler.roster.running
        self.engine.scheduler.roster.preempt(running[index % len(running)], PreemptReason.KV, self.engine.clock())
        self.settle("preempt")

    @rule(milliseconds=st.sampled_from([1, 50, 3000, 20_000, 70_000]))
    def let_time_pass(self, milliseconds: int) -> None:
        """Deadlines expire; requests have waited too long."""
        self.engine.clock.advance_ms(milliseconds)
        self.settle("wait")

    @rule(rarely=st.integers(0, 9))
    def flush(self, rarely: int) -> None:
        if rarely < 9:
            return
        self.engine.cache.flush()
        self.settle("flush")

    @rule(steps=st.integers(1, 12))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
            self.settle("step")

    def teardown(self) -> None:
        """Every request ends once and rightly, and nothing is left."""
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        for request_id in self.live:
            engine.grant(request_id, 1000)
        engine.run()
        engine.step()
        assert set(engine.ended) == set(range(1, self.added + 1))
        assert engine.pool.used_count == 0
        counters = engine.scheduler.counters
        done["guess"] += counters.drafted_token_count
        done["right guess"] += counters.accepted_token_count
        done["fed"] += engine.fed_count
        ended = engine.ended.values()
        assert not any(r.in_flight_count or r.promised_count for r in ended)
        assert counters.drafted_token_count == sum(r.clock.drafted_token_count for r in ended)
        assert counters.accepted_token_count == sum(r.clock.accepted_token_count for r in ended)
        assert counters.decoded_token_count == sum(r.output_count for r in ended)
        for request in ended:
            engine.check_answer(request)
            done[f"ended {request.finish.value if request.finish else None}"] += 1
            if request.finish is FinishReason.LENGTH:
                assert request.output_count == request.max_tokens
                if request.sampling.prompt_logprobs is not None:
                    assert len(request.prompt_logprobs) == request.prompt_count - 1


def test_no_life_breaks_the_scheduler() -> None:
    """Ten thousand operations and more, each kind among them, every ending too."""
    done.clear()
    run_state_machine_as_test(
        SchedulerLife,
        settings=settings(
            max_examples=300,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    kinds = ("add", "abort", "resume", "preempt", "wait", "flush", "step")
    assert sum(done[kind] for kind in kinds) >= OPERATIONS
    assert 500 < done["right guess"] < 0.9 * done["guess"]
    assert done["fed"] > 500
    assert all(done[kind] > 50 for kind in kinds)
    assert all(done[f"ended {ending}"] > 10 for ending in ("length", "cancelled", "deadline_exceeded"))
