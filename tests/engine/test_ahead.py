"""A step planned while the last one is computed changes when things are known, and nothing of any answer.

On a CPU a launch computes at once; everything else is as on a GPU: what a step chooses is not known to the next one's
plan, and is fed to it by place.
"""

from __future__ import annotations

import itertools
import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.engine.engine import Engine
from services.engine.loop import EngineLoop
from services.engine.outputs import StepOutput
from services.engine.plan import StepPlan
from services.engine.request import FinishReason, PreemptReason, Request, SamplingParams
from tests.engine.factories import finish_all, make_engine, make_request, tiny_config, write_model, write_scripted_model
from tests.engine.test_speculation import REQUESTS, answers

WAIT_S = 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_config())


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Emits t + 1 after t; 2 is the end of sequence, and comes after 20."""
    return write_scripted_model(tmp_path_factory.mktemp("scripted"), {20: 2})


def _ahead(path: Path, **changes: Any) -> Engine:
    return make_engine(path, async_scheduling="on", **changes)


def _plans(engine: Engine) -> list[StepPlan]:
    """Every plan that the engine computes from now on."""
    plans: list[StepPlan] = []
    run = engine._runner.run

    def noting(plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        plans.append(plan)
        return run(plan)

    engine._runner.run = noting  # type: ignore[method-assign]
    return plans


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(requests=st.lists(REQUESTS, min_size=1, max_size=5), blocks=st.integers(8, 30))
def test_answers_are_those_of_one_step_after_the_other(
    model: Path, requests: list[dict[str, Any]], blocks: int
) -> None:
    """Ids, log probabilities and endings are the same, bit for bit, whatever is asked for and however little fits."""
    assert answers(model, 0, requests, kv_blocks=blocks, async_scheduling="on") == answers(
        model, 0, requests, kv_blocks=blocks
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_is_fed_before_it_is_known(model: Path, temperature: float) -> None:
    """All tokens but the first are fed by place; the tokens come a step later, and are those of one step at a time."""

    def requests() -> list[Request]:
        sampling = SamplingParams(temperature=temperature, seed=5)
        return [make_request(i, prompt=[i + 5] * (i + 1), max_tokens=6 + i, sampling=sampling) for i in range(3)]

    engine = _ahead(model)
    plans = _plans(engine)
    assert finish_all(engine, *requests()) == finish_all(make_engine(model), *requests())
    assert sum(plan.fed_rows.size for plan in plans) == 5 + 6 + 7
    assert len(plans) == 8
    assert not any(plan.token_ids[plan.fed_rows].any() for plan in plans)


def test_what_ends_late_is_undone(scripted: Path) -> None:
    """After the end of sequence one token too many is computed; nothing of it is told, kept or found again."""
    engine = _ahead(scripted)
    plans = _plans(engine)
    first = make_request(1, prompt=[4], max_tokens=60, ignore_eos=False)
    assert finish_all(engine, first)[1] == [*range(5, 21), 2]
    assert (first.finish, first.matched_stop_id) == (FinishReason.STOP, 2)
    assert sum(plan.token_count for plan in plans) == 1 + 17
    stats = engine.stats()
    assert stats.kv_block_free + stats.kv_block_cached == stats.kv_block_total
    assert stats.kv_block_cached == 1  # of 17 tokens before the last, 16 fill a block
    second = make_request(2, prompt=[4, *range(5, 21), 2, 7], max_tokens=3)
    assert finish_all(engine, second)[2] == [8, 9, 10]
    assert second.clock.cached_token_count == 16


def test_a_length_that_is_known_costs_no_token_too_many(scripted: Path) -> None:
    """Neither max_tokens nor a reader without credits needs the ids."""
    engine = _ahead(scripted)
    plans = _plans(engine)
    request = make_request(1, prompt=[30], max_tokens=9, credit_limit=4)
    engine.add(request)
    while engine.runnable:
        engine.step()
    assert (request.output_count, request.paused) == (4, True)
    assert request.paused_since_ns
    engine.grant(1, 100)
    while engine.has_work:
        engine.step()
    assert request.output_ids.tolist() == list(range(31, 40))
    assert sum(plan.token_count for plan in plans) == 9


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.0, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, bad_sequences=((12, 13),)),
        SamplingParams(temperature=0.0, logprobs=1),
    ],
)
def test_a_step_whose_choice_needs_the_host_is_waited_for(model: Path, sampling: SamplingParams) -> None:
    """While such a request is there no token is fed; after it they are again."""
    engine = _ahead(model)
    plans = _plans(engine)
    finish_all(engine, make_request(1, max_tokens=12), make_request(2, max_tokens=4, sampling=sampling))
    fed = [plan.fed_rows.size for plan in plans]
    assert fed[:5] == [0] * 5
    assert fed[5:] == [1] * 7


def test_a_row_that_fails_ends_alone(model: Path) -> None:
    """Its logits are not finite in the third step; what was computed after it is dropped, the other goes on."""
    expected = finish_all(make_engine(model), make_request(1, max_tokens=9))[1]
    engine = _ahead(model)
    run = engine._runner.run
    plans: list[StepPlan] = []

    def failing(plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, logits = run(plan)
        plans.append(plan)
        if len(plans) == 3:
            logits = logits.clone()
            logits[1] = float("nan")
        return hidden, logits

    engine._runner.run = failing  # type: ignore[method-assign]
    victim = make_request(2, prompt=[9, 8], max_tokens=9)
    told = finish_all(engine, make_request(1, max_tokens=9), victim)
    assert told[1] == expected
    assert (len(told[2]), victim.finish, victim.error) == (2, FinishReason.ERROR, "the logits are not finite")


def test_a_step_that_cannot_be_launched_is_computed_when_the_last_one_is_known(model: Path) -> None:
    """Sequence by sequence, with the tokens that were to be fed; answers are the same."""

    def requests() -> list[Request]:
        return [make_request(i, prompt=[20 + i], max_tokens=8) for i in range(3)]

    engine = _ahead(model)
    launch = engine._runner.launch
    broken = 0

    def failing(step: Any) -> Any:
        nonlocal broken
        if len(step.requests) == 3 and step.plan.fed_rows.size:
            broken += 1
            raise RuntimeError("a kernel gave up")
        return launch(step)

    engine._runner.launch = failing  # type: ignore[method-assign]
    assert finish_all(engine, *requests()) == finish_all(make_engine(model), *requests())
    assert broken


def test_a_request_preempted_in_flight_keeps_its_token(model: Path) -> None:
    """It is not started again before that is known, and its answer is the same."""
    expected = finish_all(make_engine(model), make_request(1, max_tokens=20))[1]
    engine = _ahead(model)
    request = make_request(1, max_tokens=20)
    engine.add(request)
    for _ in range(4):
        engine.step()
    known, roster = request.output_count, engine._scheduler.roster
    roster.preempt(request, PreemptReason.KV, engine._clock())
    engine.step()
    assert (request.output_count, len(roster.running)) == (known + 1, 0)
    engine.check_integrity()
    while engine.has_work:
        engine.step()
        engine.check_integrity()
    assert request.output_ids.tolist() == expected
    assert (request.in_flight_count, request.promised_count) == (0, 0)


def test_an_aborted_request_is_told_nothing_more(scripted: Path) -> None:
    """Cancelled on what was published, as a stop string is: one ending, no token after it, its id may come again."""
    engine = _ahead(scripted)
    said: queue.Queue[StepOutput] = queue.Queue()
    deaths: queue.Queue[BaseException] = queue.Queue()
    loop = EngineLoop(engine, publish=said.put, refused=lambda *_: None, fatal=deaths.put)
    loop.start()
    try:
        for _ in range(10):
            loop.add(make_request(1, prompt=[21], max_tokens=400))
            tokens: list[int] = []
            endings: list[FinishReason] = []
            while not endings:
                for output in said.get(timeout=WAIT_S).outputs:
                    tokens += output.token_ids
                    endings += [output.finish] if output.finish is not None else []
                if len(tokens) == 3:
                    loop.abort(1)
            assert endings == [FinishReason.CANCELLED]
            assert tokens == [(22 + place) % 64 for place in range(len(tokens))]
        stats = loop.call(Engine.stats).result(WAIT_S)
        assert stats.kv_block_free + stats.kv_block_cached == stats.kv_block_total
    finally:
        loop.stop(drain=False)
        assert loop.join(WAIT_S)
    assert deaths.empty()


def test_steps_follow_each_other_in_what_is_told(scripted: Path) -> None:
    """Their times do not overlap though they do; the host's gap is 0 before what was launched before the last ended."""
    engine = _ahead(scripted)
    engine.add(make_request(1, prompt=[21], max_tokens=6))
    facts = []
    while engine.has_work:
        told = engine.step().facts
        facts += [told] if told is not None else []
    assert len(facts) == 6
    for before, after in itertools.pairwise(facts):
        assert after.started_ns >= before.started_ns
        assert after.host_gap_ns == 0
    assert facts[0].host_gap_ns is None


def test_where_it_pays_and_where_it_cannot_be(model: Path) -> None:
    """By itself on a GPU alone, and not beside guesses; asked for with guesses it is refused, naming both."""
    config = make_engine(model).config
    assert (config.plans_ahead("cpu"), config.plans_ahead("cuda")) == (False, True)
    assert _ahead(model).config.plans_ahead("cpu")
    assert not make_engine(model, num_speculative_tokens=4).config.plans_ahead("cuda")
    assert not make_engine(model, async_scheduling="off").config.plans_ahead("cuda")
    with pytest.raises(ValueError, match=r"^async_scheduling is 'on' with num_speculative_tokens 4; it needs 0"):
        _ahead(model, num_speculative_tokens=4)
