"""The whole engine on tiny models: answers do not depend on company, preemption or caching; nothing leaks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from services.engine.engine import Engine, EngineConfig
from services.engine.request import FinishReason, PreemptReason, Request, RequestRefused, SamplingParams
from tests.engine.factories import (
    GREEDY,
    Clock,
    finish_all,
    make_engine,
    make_request,
    step_outputs,
    tiny_config,
    write_model,
    write_scripted_model,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_config())


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Emits t + 1 after t; 2 is the end of sequence."""
    return write_scripted_model(tmp_path_factory.mktemp("scripted"), {9: 2})


def _alone(path: Path, make: Any) -> list[int]:
    request = make()
    return finish_all(make_engine(path), request)[request.request_id]


SAMPLINGS = (
    GREEDY,
    SamplingParams(temperature=1.0, seed=3),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, repetition_penalty=1.3),
    SamplingParams(temperature=1.2, top_k=20, seed=5, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=0.0, min_tokens=60, logit_bias={2: 100.0}),
)


def test_preemption_changes_no_answer(model: Path) -> None:
    """Eight requests of 5 + 101 tokens on ten blocks of 16: all end as alone, and preemptions happened."""

    def make(i: int) -> Request:
        prompt = [(i * 7 + k) % 97 for k in range(5)]
        sampling = SAMPLINGS[i % len(SAMPLINGS)]
        return make_request(i, prompt=prompt, max_tokens=101, sampling=sampling, ignore_eos=i % 2 == 0)

    engine = make_engine(model, kv_blocks=10)
    requests = [make(i) for i in range(8)]
    answers = finish_all(engine, *requests)
    assert engine.stats().preemption_count > 0
    assert max(r.clock.preemption_count for r in requests) <= 3
    for i in range(8):
        assert answers[i] == _alone(model, lambda i=i: make(i))
    stats = engine.stats()
    assert stats.kv_block_free + stats.kv_block_cached == stats.kv_block_total
    assert (stats.running_count, stats.waiting_count, stats.paused_count) == (0, 0, 0)


def test_random_company_cancels_and_pauses_change_no_answer(model: Path) -> None:
    """Shared prefixes on 24 blocks, random aborts and credits: what finishes equals what it is alone."""
    draw = random.Random(1)
    engine = make_engine(model, kv_blocks=24, max_num_seqs=5)
    prompts = [[draw.randrange(97) for _ in range(60)] for _ in range(3)]
    made: dict[int, Any] = {}
    answers: dict[int, list[int]] = {}
    finished: dict[int, FinishReason] = {}

    def collect() -> None:
        for output in engine.step().outputs:
            answers[output.request_id].extend(output.token_ids)
            if output.finish is not None:
                assert output.request_id not in finished
                finished[output.request_id] = output.finish
        engine.check_integrity()

    for serial in range(60):
        prompt = draw.choice(prompts)[: draw.randint(1, 60)]
        tokens, sampling = draw.randint(1, 40), draw.choice(SAMPLINGS[:4])
        made[serial] = lambda i=serial, p=prompt, t=tokens, s=sampling: make_request(
            i, prompt=p, max_tokens=t, sampling=s
        )
        request = made[serial]()
        request.credit_limit = draw.choice([2, 1000])
        answers[serial] = []
        engine.add(request)
        for _ in range(draw.randint(0, 6)):
            collect()
        if draw.random() < 0.3:
            engine.abort(draw.randrange(serial + 1))
        engine.grant(draw.randrange(serial + 1), draw.randint(1, 40))
    for serial in range(60):
        engine.grant(serial, 1000)
    while engine.has_work:
        collect()
    assert set(finished) == set(made)
    assert FinishReason.CANCELLED in finished.values()
    for serial, reason in finished.items():
        alone = _alone(model, made[serial])
        assert answers[serial] == (alone if reason is FinishReason.LENGTH else alone[: len(answers[serial])])
    stats = engine.stats()
    assert stats.kv_block_free + stats.kv_block_cached == stats.kv_block_total


def test_the_end_of_sequence_token_is_part_of_the_answer(scripted: Path) -> None:
    """STOP, with the token among the tokens and named as the match."""
    engine = make_engine(scripted)
    request = make_request(prompt=[6], ignore_eos=False)
    assert finish_all(engine, request)[1] == [7, 8, 9, 2]
    assert (request.finish, request.matched_stop_id) == (FinishReason.STOP, 2)


def test_length_and_stop_ids_and_ignored_eos(scripted: Path) -> None:
    """max_tokens ends with LENGTH; a stop id with STOP; an ignored end of sequence does not end."""
    engine = make_engine(scripted)
    length = make_request(1, prompt=[6], max_tokens=2)
    stop = make_request(2, prompt=[6], stop_token_ids=[8])
    ignoring = make_request(3, prompt=[6], max_tokens=6)
    answers = finish_all(engine, length, stop, ignoring)
    assert answers == {1: [7, 8], 2: [7, 8], 3: [7, 8, 9, 2, 3, 4]}
    assert length.finish is FinishReason.LENGTH
    assert (stop.finish, stop.matched_stop_id) == (FinishReason.STOP, 8)
    assert ignoring.finish is FinishReason.LENGTH


@pytest.mark.parametrize("preempt", [False, True])
def test_min_tokens_releases_the_end_exactly_then(scripted: Path, preempt: bool) -> None:
    """With a bias on the end and min_tokens 4: four other tokens, then the end at index 4."""
    engine = make_engine(scripted)
    sampling = SamplingParams(temperature=0.0, min_tokens=4, logit_bias={2: 1000.0})
    request = make_request(prompt=[20], max_tokens=32, sampling=sampling, ignore_eos=False)
    engine.add(request)
    while engine.has_work:
        engine.step()
        if preempt and request.output_count == 2 and request.clock.preemption_count == 0:
            engine._scheduler.roster.preempt(request, PreemptReason.KV, engine._clock())
    assert request.output_ids.tolist() == [21, 22, 23, 24, 2]
    assert request.finish is FinishReason.STOP
    assert request.clock.preemption_count == int(preempt)


def test_unset_max_tokens_runs_to_the_end_of_the_context(scripted: Path) -> None:
    """LENGTH with prompt and output filling the context; or the pool, when that is smaller."""
    for changes, total in (({"max_model_len": 40}, 40), ({"kv_blocks": 2}, 33)):
        engine = make_engine(scripted, **changes)
        request = make_request(prompt=[5] * 10, max_tokens=None)
        finish_all(engine, request)
        assert request.finish is FinishReason.LENGTH
        assert request.token_count == total


@pytest.mark.parametrize("prompt", [[], [-1], [64], [3] * 600])
def test_a_bad_prompt_is_refused_beside_a_running_stream(scripted: Path, prompt: list[int]) -> None:
    """The refusal comes from ``add``; the stream does not notice."""
    engine = make_engine(scripted)
    stream = make_request(1, prompt=[10], max_tokens=20)
    engine.add(stream)
    engine.step()
    with pytest.raises(RequestRefused):
        engine.add(make_request(2, prompt=prompt))
    with pytest.raises(RequestRefused, match="in use"):
        engine.add(make_request(1))
    step_outputs(engine)
    assert stream.output_ids.tolist() == list(range(11, 31))


def test_a_row_with_broken_logits_ends_with_error_alone(model: Path) -> None:
    """One request's NaN is its own ERROR with a text; the other's answer is what it is alone."""
    engine = make_engine(model)
    run = engine._runner.run

    def poisoned(plan: Any) -> Any:
        hidden, logits = run(plan)
        logits = logits.clone()
        logits[0] = float("nan")
        return hidden, logits

    victim, other = make_request(1), make_request(2, prompt=[8, 9], max_tokens=8)
    engine.add(victim)
    engine.add(other)
    engine.step()
    engine._runner.run = poisoned  # type: ignore[method-assign]
    outputs = engine.step().outputs
    engine._runner.run = run  # type: ignore[method-assign]
    ended = next(output for output in outputs if output.finish is not None)
    assert (ended.request_id, ended.finish, ended.token_ids) == (1, FinishReason.ERROR, ())
    assert "not finite" in str(ended.error)
    step_outputs(engine)
    assert other.output_ids.tolist() == _alone(model, lambda: make_request(2, prompt=[8, 9], max_tokens=8))
    assert engine.stats().kv_block_free + engine.stats().kv_block_cached == 64


def test_outputs_carry_usage_with_the_first_token_and_the_ending(scripted: Path) -> None:
    """Usage counts every generated token; times follow one another."""
    clock = Clock()
    engine = make_engine(scripted, clock)
    engine.add(make_request(prompt=[10] * 20, max_tokens=3))
    outputs = []
    while engine.has_work:
        clock.advance_ms(2)
        outputs.extend(engine.step().outputs)
    assert [output.usage is not None for output in outputs] == [True, False, True]
    usage = outputs[-1].usage
    assert usage is not None
    assert (usage.prompt_token_count, usage.output_token_count) == (20, 3)
    times = usage.clock
    assert 0 < times.arrival_ns < times.first_scheduled_ns <= times.first_token_ns
    assert times.first_token_ns < times.last_token_ns <= times.finished_ns
    assert times.gaps_ns == [2_000_000, 2_000_000]
    assert times.gap_ns(0.5) == times.gap_ns(0.99) == 2_000_000


def test_aborts_are_published_once(scripted: Path) -> None:
    """CANCELLED comes with the next step; a second abort and a late one publish nothing."""
    engine = make_engine(scripted)
    engine.add(make_request(1, max_tokens=50))
    engine.step()
    assert engine.abort(1)
    assert not engine.abort(1)
    assert engine.has_work
    outputs = engine.step().outputs
    assert [(o.request_id, o.finish, o.token_ids) for o in outputs] == [(1, FinishReason.CANCELLED, ())]
    assert not engine.has_work
    assert not engine.abort(1)
    assert engine.step().outputs == []


def test_warm_up_leaves_no_trace(scripted: Path) -> None:
    """Statistics, cache and ids are as before, and a small pool is enough."""
    for changes in ({}, {"kv_blocks": 1}, {"max_model_len": 2}):
        engine = make_engine(scripted, **changes)
        before = engine.stats()
        engine.warm_up()
        assert engine.stats() == before
        engine.check_integrity()


def test_a_flushed_cache_hits_nothing(model: Path) -> None:
    """After a flush the same prompt is computed whole and answered the same."""
    engine = make_engine(model)
    first = finish_all(engine, make_request(1, prompt=range(40)))[1]
    assert engine.flush_prefix_cache() > 0
    again = make_request(2, prompt=range(40))
    assert finish_all(engine, again)[2] == first
    assert again.clock.cached_token_count == 0


def test_memory_is_accounted_by_the_formula(model: Path) -> None:
    """KV bytes follow from the shape; explicit bytes and a share both bound the pool."""
    engine = make_engine(model)
    assert engine.memory.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert engine.memory.kv_bytes == sum(layer.nbytes for layer in engine._runner.kv)
    by_bytes = make_engine(model, kv_blocks=None, kv_memory_bytes=512 * 16 * 7)
    assert by_bytes.memory.block_count == 7
    by_share = make_engine(model, kv_blocks=None)
    assert 0 < by_share.memory.block_count <= 2 * 8 * 32


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 12),
        ("dtype", "int8"),
        ("kernels", "gpu"),
        ("kv_blocks", 0),
        ("threads", -1),
        ("max_model_len", 1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 3),
        ("watermark", 0.0),
        ("kv_memory_utilization", 1.5),
    ],
)
def test_a_bad_setting_is_named(field: str, value: Any) -> None:
    """The message starts with the field."""
    with pytest.raises(ValueError, match=f"^{field} is"):
        EngineConfig(Path(), **{field: value})


def test_the_package_offers_the_engine() -> None:
    """``services.engine`` gives Engine and EngineConfig, and nothing by a wrong name."""
    import services.engine

    assert services.engine.Engine is Engine
    assert services.engine.EngineConfig is EngineConfig
    with pytest.raises(AttributeError):
        _ = services.engine.Motor
