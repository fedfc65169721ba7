"""A random life: whatever happens to a request, nothing leaks and its tokens are those it gets alone."""

from __future__ import annotations

import random

import pytest

from services.engine.request import FinishReason, Priority, Request
from tests.engine.factories import SymbolicEngine, make_request

OPERATIONS = 10_000


@pytest.mark.parametrize(("seed", "ahead"), [(0, False), (1, False), (2, False), (0, True), (1, True)])
def test_random_add_abort_pause_resume_expire_preempt(seed: int, ahead: bool) -> None:
    """Ten thousand operations on 24 blocks: integrity after each step, every answer as alone, all end once."""
    draw = random.Random(seed)
    engine = SymbolicEngine(block_count=24, ahead=ahead, max_num_seqs=5, paused_grace_ns=5_000_000)
    live: dict[int, Request] = {}
    prompts = [[draw.randrange(50) for _ in range(draw.randint(1, 30))] for _ in range(8)]
    added = 0
    for _ in range(OPERATIONS):
        kind = draw.random()
        if kind < 0.12 and len(live) < 14:
            added += 1
            prompt = draw.choice(prompts)[: draw.randint(1, 30)]
            request = make_request(
                added,
                prompt=prompt,
                max_tokens=draw.randint(1, 97 - len(prompt)),
                priority=draw.choice(list(Priority)),
                cache_salt=draw.choice([b"", b"tenant"]),
                credit_limit=draw.choice([0, 1, 5, 1000]),
                deadline_ns=engine.clock() + draw.randint(1, 400) * 1_000_000 if draw.random() < 0.2 else None,
            )
            live[added] = engine.add(request)
        elif kind < 0.15 and live:
            engine.abort(draw.choice(list(live)))
        elif kind < 0.3 and live:
            engine.grant(draw.choice(list(live)), draw.randint(1, 8))
        elif kind < 0.301:
            engine.cache.flush()
        else:
            engine.step()
        live = {i: r for i, r in live.items() if i not in engine.ended}
    for request_id in live:
        engine.grant(request_id, 1000)
    engine.run()
    engine.step()
    assert set(engine.ended) == set(range(1, added + 1))
    assert engine.scheduler.roster.preemption_count > 0
    assert engine.pool.used_count == 0
    for request in engine.ended.values():
        engine.check_answer(request)
        if request.finish is FinishReason.LENGTH:
            assert request.output_count == request.max_tokens
