"""Guarantees of the two profiles, in tokens a step: who stalls, who is served first, and that nobody starves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from services.engine.config import INTERACTIVE_CHUNK_TOKENS, EngineConfig
from services.engine.request import Request
from services.engine.step import ScheduledStep
from tests.engine.factories import SymbolicEngine, make_request


def _engine(profile: str, **changes: Any) -> SymbolicEngine:
    """A symbolic engine with the bounds that an engine of that profile has by default."""
    budget = EngineConfig(model_dir=None, profile=profile, **changes).scheduling().budget  # type: ignore[arg-type]
    bounds = {name: getattr(budget, name) for name in budget.__slots__}
    return SymbolicEngine(block_count=4096, **bounds)


def _streams(engine: SymbolicEngine, count: int) -> list[Request]:
    streams = [engine.add(make_request(i, prompt=[i, 1, 2], max_tokens=2000)) for i in range(count)]
    while any(stream.output_count == 0 for stream in streams):
        engine.step()
    return streams


def _step(engine: SymbolicEngine) -> ScheduledStep:
    step = engine.step()
    assert step is not None
    return step


def test_interactive_a_long_prompt_takes_a_small_chunk_beside_eight_streams() -> None:
    """2,048 tokens arrive: each step carries every stream's token and at most 32 of the prompt's."""
    engine = _engine("interactive")
    streams = _streams(engine, 8)
    long = engine.add(make_request(99, prompt=range(2048), max_tokens=1))
    steps = 0
    while long.finish is None:
        before = [stream.output_count for stream in streams]
        step = _step(engine)
        steps += 1
        assert [stream.output_count for stream in streams] == [count + 1 for count in before]
        assert step.prefill_token_count <= INTERACTIVE_CHUNK_TOKENS
    assert steps == 2048 // INTERACTIVE_CHUNK_TOKENS


def test_interactive_several_prompts_share_two_chunks() -> None:
    """However many prompts wait, no step beside streams computes more than two chunks of them."""
    engine = _engine("interactive")
    streams = _streams(engine, 4)
    prompts = [engine.add(make_request(100 + i, prompt=range(i, 300 + i), max_tokens=1)) for i in range(6)]
    while any(prompt.finish is None for prompt in prompts):
        before = [stream.output_count for stream in streams]
        step = _step(engine)
        assert step.prefill_token_count <= 2 * INTERACTIVE_CHUNK_TOKENS
        assert [stream.output_count for stream in streams] == [count + 1 for count in before]


def test_interactive_short_prompts_pass_all_long_ones_but_the_oldest() -> None:
    """Three prompts of 640 tokens run beside streams; whoever comes with 40 has its token within three steps.

    The oldest long prompt gets its chunk in every step meanwhile, and no chunk is left unused.
    """
    engine = _engine("interactive")
    engine.step_ms = lambda _plan: 30.0
    _streams(engine, 4)
    long = [engine.add(make_request(100 + i, prompt=range(1000 * i, 1000 * i + 640), max_tokens=1)) for i in range(3)]
    for _ in range(2):
        _step(engine)
    oldest = long[0]
    while oldest.pending_count > 3 * INTERACTIVE_CHUNK_TOKENS:
        number = 10_000 + oldest.computed_count
        short = engine.add(make_request(number, prompt=range(number, number + 40), max_tokens=1))
        for _ in range(3):
            before = oldest.computed_count
            assert _step(engine).prefill_token_count == 2 * INTERACTIVE_CHUNK_TOKENS
            assert oldest.computed_count == before + INTERACTIVE_CHUNK_TOKENS
        assert short.finish is not None
    engine.run()
    assert all(request.finish is not None for request in long)


@pytest.mark.parametrize("profile", ["interactive", "throughput"])
def test_a_prompt_alone_has_the_whole_step(profile: str) -> None:
    """With nobody to stall, 2,048 tokens take four steps of 512."""
    engine = _engine(profile)
    engine.add(make_request(1, prompt=range(2048), max_tokens=1))
    assert [step.plan.token_count for step in engine.run()] == [512] * 4


def test_throughput_a_long_prompt_takes_all_that_streams_leave() -> None:
    """Streams have their token first; the prompt has the rest of the budget."""
    engine = _engine("throughput")
    _streams(engine, 8)
    engine.add(make_request(99, prompt=range(2048), max_tokens=1))
    step = _step(engine)
    assert (step.plan.token_count, step.prefill_token_count) == (512, 504)


def test_where_a_step_is_too_small_interactive_serves_prompts_and_streams_take_turns() -> None:
    """16 tokens a step, 15 streams: the prompt goes on by half a step, and no stream is skipped twice in a row."""
    engine = _engine("interactive", max_num_batched_tokens=16, max_num_seqs=16)
    streams = _streams(engine, 15)
    long = engine.add(make_request(99, prompt=range(400), max_tokens=1))
    _step(engine)  # the prompt is admitted, with what streams leave
    start = [stream.output_count for stream in streams]
    steps = [_step(engine) for _ in range(45)]
    assert Counter(step.prefill_token_count for step in steps) == {8: 45}
    gained = [stream.output_count - count for stream, count in zip(streams, start, strict=True)]
    assert sum(gained) == 45 * 8
    assert min(gained) >= 22
    assert long.computed_count == 361


def test_where_a_step_is_too_small_throughput_serves_streams() -> None:
    """The same in the other profile: every stream in every step, one token for the prompt."""
    engine = _engine("throughput", max_num_batched_tokens=16, max_num_seqs=16)
    _streams(engine, 15)
    engine.add(make_request(99, prompt=range(400), max_tokens=1))
    for _ in range(20):
        step = _step(engine)
        assert (step.plan.decode_count, step.plan.token_count) == (16, 16)


def test_an_explicit_chunk_holds_in_both_profiles() -> None:
    """max_chunk_tokens bounds a prompt's share of any step."""
    for profile in ("interactive", "throughput"):
        engine = _engine(profile, max_chunk_tokens=100)
        engine.add(make_request(1, prompt=range(350), max_tokens=1))
        assert [step.plan.token_count for step in engine.run()] == [100, 100, 100, 50]
