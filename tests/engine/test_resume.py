"""A request that goes on after an earlier run's output does exactly what that run would have done."""

from __future__ import annotations

import pytest

from headrace.v1 import engine_pb2, generation_pb2
from services.engine import wire
from services.engine.request import SamplingParams
from tests.engine.factories import finish_all, make_engine, make_request, tiny_config, write_model

PROMPT = (5, 6, 7, 8, 9)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, top_p=0.9, seed=7),
    "penalties": SamplingParams(
        temperature=0.8, seed=3, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4
    ),
    "min_tokens": SamplingParams(temperature=1.0, seed=5, min_tokens=9),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("cut", [1, 4, 15, 16, 17, 23])
def test_the_rest_is_what_the_whole_run_made(tmp_path, sampling, cut):
    """Cut anywhere, on another engine: earlier tokens and new ones are the undisturbed answer."""
    path = write_model(tmp_path / "model", tiny_config())
    fields = {"prompt": PROMPT, "max_tokens": 24, "sampling": sampling, "ignore_eos": True}
    whole = finish_all(make_engine(path), make_request(1, **fields))[1]
    resumed = make_request(1, **fields, generated_ids=whole[:cut], credit_limit=24 - cut)
    assert whole[:cut] + finish_all(make_engine(path), resumed)[1] == whole
    assert resumed.output_count == 24


def opened(generated, **fields):
    command = engine_pb2.OpenGeneration(
        prompt_token_ids=PROMPT, generated_token_ids=generated, credit_count=5, max_tokens=6, **fields
    )
    facts = engine_pb2.GetEngineResponse(context_length=100, kv_token_capacity=64, eos_token_ids=[2])
    return wire.ended_before(wire.request_of(command, 0, 1, 1000), facts, 77)


def test_an_ending_that_was_never_told_is_told():
    """The earlier run had drawn its last token; the engine need not run at all."""
    stopped = opened([4, 2])
    assert (stopped.generation_id, stopped.ending.matched_token_id) == (77, 2)
    assert stopped.ending.finish_reason == generation_pb2.FINISH_REASON_STOP
    assert stopped.ending.usage.completion_token_count == 2
    assert opened([3] * 6).ending.finish_reason == generation_pb2.FINISH_REASON_LENGTH


def test_what_had_not_ended_goes_on():
    """EOS before min_tokens, EOS that is ignored, fewer tokens than allowed, nothing generated."""
    assert opened([4, 2], min_tokens=3) is None
    assert opened([4, 2], ignore_eos=True) is None
    assert opened([4, 5]) is None
    assert opened([]) is None


def test_credits_are_for_new_tokens():
    """The window of a resumed request is beyond what it has."""
    command = engine_pb2.OpenGeneration(prompt_token_ids=PROMPT, generated_token_ids=[1, 2, 3], credit_count=5)
    assert wire.request_of(command, 0, 1, 1000).credit_limit == 8
