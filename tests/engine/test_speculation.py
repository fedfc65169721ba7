"""Guessing ahead changes how fast an answer comes, and nothing else of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.engine.engine import Engine
from services.engine.outputs import RequestOutput
from services.engine.request import FinishReason, PreemptReason, Request, SamplingParams
from services.engine.speculation import Lookup
from services.engine.step import ScheduledStep, StepResult
from tests.engine.factories import (
    SymbolicEngine,
    finish_all,
    make_engine,
    make_request,
    step_outputs,
    tiny_config,
    write_model,
    write_scripted_model,
)

PERIOD = 6


def _tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_config())


@pytest.fixture(scope="module")
def circle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that goes round in six tokens for ever: 10, 11, ..., 15, 10."""
    return write_scripted_model(tmp_path_factory.mktemp("circle"), {9 + PERIOD: 10})


# --- what is guessed ------------------------------------------------------------------------------------


def test_a_guess_is_what_followed_the_last_three_tokens_before() -> None:
    """The latest time that they stood together counts; nothing is guessed where they never did."""
    lookup = Lookup()
    assert lookup.guess(_tokens(1, 2, 3, 4, 5), 4).size == 0
    assert lookup.guess(_tokens(1, 2, 3, 4, 5, 1, 2, 3), 4).tolist() == [4, 5, 1, 2]
    assert lookup.guess(_tokens(1, 2, 3, 4, 5, 1, 2, 3, 9, 1, 2, 3), 2).tolist() == [9, 1]


def test_a_guess_goes_on_as_a_loop_would() -> None:
    """Where what followed reaches the present, it follows itself."""
    assert Lookup().guess(_tokens(8, 7, 7, 7, 7), 5).tolist() == [7] * 5
    assert Lookup().guess(_tokens(1, 2, 3, 1, 2, 3), 7).tolist() == [1, 2, 3, 1, 2, 3, 1]


def test_tokens_that_come_one_by_one_are_found_like_those_that_came_at_once() -> None:
    """The index grows with the text, whatever the pieces."""
    text = np.random.default_rng(0).integers(0, 4, 300).astype(np.int32)
    grown = Lookup()
    for size in range(300):
        assert grown.guess(text[:size], 6).tolist() == Lookup().guess(text[:size], 6).tolist()


def test_acceptance_follows_the_guesses() -> None:
    """Right ones raise it, one that was wrong lowers it, and what comes after a wrong one says nothing."""
    text = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    right, wrong, later = Lookup(), Lookup(), Lookup()
    for lookup in (right, wrong, later):
        lookup.guess(_tokens(*text), 3)
    right.learn(_tokens(*text, 4, 5, 6))
    wrong.learn(_tokens(*text, 9))
    later.learn(_tokens(*text, 9, 5, 6))
    assert wrong.acceptance == later.acceptance < Lookup().acceptance < right.acceptance


# --- what is answered -----------------------------------------------------------------------------------


def answers(model: Path, guesses: int, requests: list[dict[str, Any]], **options: Any) -> dict[int, dict[str, Any]]:
    """What each request was told, joined over its news, and how it ended."""
    engine = make_engine(model, num_speculative_tokens=guesses, deterministic=True, **options)
    for number, fields in enumerate(requests):
        engine.add(make_request(number, **fields))
    told: dict[int, dict[str, Any]] = {n: {"ids": [], "logprobs": [], "prompt": []} for n in range(len(requests))}

    def take(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            answer = told[output.request_id]
            assert output.finish is not None or output.token_ids
            answer["ids"] += output.token_ids
            answer["logprobs"] += output.logprobs or ()
            answer["prompt"] += output.prompt_logprobs or ()
            if output.finish is not None:
                answer["end"] = (output.finish, output.matched_stop_id, output.error)

    while engine.has_work:
        take(step_outputs(engine))
        for number, fields in enumerate(requests):  # readers take what there is
            engine.grant(number, fields.get("credit_limit", 1))
    assert engine.stats().kv_block_free + engine.stats().kv_block_cached == engine.stats().kv_block_total
    told[-1] = {"drafted": engine.stats().drafted_token_count, "accepted": engine.stats().accepted_token_count}
    return told


SAMPLINGS = st.fixed_dictionaries(
    {"seed": st.integers(0, 99)},
    optional={
        "temperature": st.sampled_from([0.0, 0.2, 0.6, 1.0]),
        "top_k": st.sampled_from([2, 20]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "min_p": st.just(0.1),
        "repetition_penalty": st.sampled_from([0.7, 1.3]),
        "presence_penalty": st.sampled_from([-2.0, 0.5]),
        "frequency_penalty": st.sampled_from([-1.0, 0.3]),
        "min_tokens": st.integers(1, 20),
        "logprobs": st.sampled_from([0, 3]),
        "prompt_logprobs": st.just(2),
        "bad_sequences": st.sampled_from([((5, 6),), ((7,), (8, 9, 10))]),
        "allowed_token_ids": st.just(tuple(range(4, 12))),
        "logit_bias": st.just({5: 3.0, 6: 3.0}),
    },
)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(3, 8), min_size=1, max_size=40),
        "sampling": SAMPLINGS.map(lambda fields: SamplingParams(**fields)),
        "max_tokens": st.integers(20, 45),
    },
    optional={
        "stop_token_ids": st.sampled_from([(5,), (6, 30)]),
        "credit_limit": st.integers(1, 9),
        "generated_ids": st.lists(st.integers(3, 8), min_size=1, max_size=6),
        "ignore_eos": st.booleans(),
    },
)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    requests=st.lists(REQUESTS, min_size=1, max_size=5), guesses=st.sampled_from([1, 4, 9]), blocks=st.integers(8, 30)
)
def test_answers_are_those_without_guesses(
    model: Path, requests: list[dict[str, Any]], guesses: int, blocks: int
) -> None:
    """Ids, log probabilities and endings are the same, bit for bit, whatever is asked for and however little fits."""
    plain = answers(model, 0, requests, kv_blocks=blocks)
    guessed = answers(model, guesses, requests, kv_blocks=blocks)
    assert plain.pop(-1) == {"drafted": 0, "accepted": 0}
    del guessed[-1]
    assert guessed == plain


def test_the_property_above_is_not_empty(model: Path) -> None:
    """Of such requests many guesses are computed, and some are right, some wrong."""
    requests = [
        {
            "prompt": [3, 4, 5] * 5,
            "max_tokens": 60,
            "sampling": SamplingParams(temperature=t, seed=1, frequency_penalty=-1),
        }
        for t in (0.0, 0.5, 1.0)
    ]
    counts = answers(model, 4, requests)[-1]
    assert 10 < counts["accepted"] < counts["drafted"]


def test_a_circle_is_answered_in_a_fraction_of_the_steps(circle: Path) -> None:
    """Right guesses come with the token before them, in one piece of news, up to the length and the credits exactly."""
    engine = make_engine(circle, num_speculative_tokens=8)
    request = make_request(1, prompt=[10, 11, 12, 13, 14, 15], max_tokens=60, credit_limit=50)
    engine.add(request)
    news = step_outputs(engine)
    assert request.paused
    assert request.output_count == 50
    engine.grant(1, 100)
    news += step_outputs(engine)
    ids = [token for output in news for token in output.token_ids]
    assert ids == [10 + place % PERIOD for place in range(60)]
    clock = request.clock
    assert clock.decode_step_count == len([output for output in news if output.token_ids]) < 20
    assert clock.accepted_token_count == 60 - clock.decode_step_count
    assert len(clock.gaps_ns) == 59


def test_nothing_after_a_stop_token_is_told(circle: Path) -> None:
    """Guesses beyond it were right too, and are not part of the answer."""
    for stop in range(10, 10 + PERIOD):
        engine = make_engine(circle, num_speculative_tokens=12)
        request = make_request(1, prompt=[*range(10, 10 + PERIOD)] * 3, max_tokens=60, stop_token_ids=(stop,))
        assert finish_all(engine, request)[1] == [*range(10, stop + 1)]
        assert (request.finish, request.matched_stop_id) == (FinishReason.STOP, stop)


def test_wrong_guesses_leave_nothing_in_the_prefix_cache(circle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every guess is wrong; a later request that finds the answer's blocks is answered as without them."""
    monkeypatch.setattr(Lookup, "guess", lambda self, tokens, count: np.full(count, 40, dtype=np.int32))
    monkeypatch.setattr(Lookup, "learn", lambda self, tokens: None)
    engine = make_engine(circle, num_speculative_tokens=8)
    first = make_request(1, prompt=[10, 11, 12], max_tokens=90)
    ids = finish_all(engine, first)[1]
    assert ids == [10 + place % PERIOD for place in range(3, 93)]
    assert (first.clock.drafted_token_count > 100, first.clock.accepted_token_count) == (True, 0)
    second = make_request(2, prompt=[10, 11, 12, *ids[:80]], max_tokens=10)
    assert finish_all(engine, second)[2] == ids[80:90]
    assert second.clock.cached_token_count == 80


def test_guesses_take_no_room_from_others() -> None:
    """With every block in use, guesses get the places that are left over, and nobody is preempted for them."""

    def preemptions(guesses: int) -> tuple[int, int]:
        engine = SymbolicEngine(block_count=20, num_speculative_tokens=guesses, max_num_batched_tokens=64)
        for number in range(4):
            engine.add(make_request(number, prompt=[45, 46, 47, 48, 49] * 2, max_tokens=11))
        engine.run()
        counters = engine.scheduler.counters
        return engine.scheduler.roster.preemption_count, counters.drafted_token_count

    assert preemptions(0) == (0, 0)
    assert preemptions(12)[0] == 0
    assert preemptions(12)[1] > 0


def test_a_request_that_cannot_be_guessed_stops_being_drafted(circle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a few wrong guesses none is computed any more, but for one beside a long prompt."""
    monkeypatch.setattr(Lookup, "_index", lambda self, tokens: self._places.update({_last(tokens): 0}))
    engine = make_engine(circle, num_speculative_tokens=8)
    request = make_request(1, prompt=[40, 41, 42], max_tokens=80)
    finish_all(engine, request)
    assert 0 < request.clock.drafted_token_count < 40
    assert request.clock.accepted_token_count == 0


def _last(tokens: np.ndarray) -> int:
    from services.engine.speculation import _key

    return _key(tokens[-3:].tolist())


def test_a_guess_that_breaks_a_step_ends_nobody(circle: Path) -> None:
    """The step is computed again without guesses."""
    engine = make_engine(circle, num_speculative_tokens=8)
    launch = engine._runner.launch
    broken = 0

    def failing(planned: ScheduledStep) -> Callable[[], StepResult]:
        nonlocal broken
        if planned.draft_token_count:
            broken += 1
            raise RuntimeError("a kernel gave up")
        return launch(planned)

    engine._runner.launch = failing  # type: ignore[method-assign]
    request = make_request(1, prompt=[10, 11, 12, 13, 14, 15, 10], max_tokens=20)
    assert finish_all(engine, request)[1] == [10 + place % PERIOD for place in range(1, 21)]
    assert broken
    assert request.clock.accepted_token_count == 0


def test_a_preempted_request_goes_on_guessing(circle: Path) -> None:
    """Its text is known still, so is where to look."""
    engine: Engine = make_engine(circle, num_speculative_tokens=4)
    request: Request = make_request(1, prompt=[10, 11, 12], max_tokens=60)
    engine.add(request)
    for _ in range(8):
        engine.step()
    engine._scheduler.roster.preempt(request, PreemptReason.KV, engine._clock())
    step_outputs(engine)
    assert request.output_ids.tolist() == [10 + place % PERIOD for place in range(3, 63)]
    assert request.clock.decode_step_count + request.clock.accepted_token_count == 60
