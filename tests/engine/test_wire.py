"""Between the contract and the engine nothing is lost, and an unset field never reads as zero."""

from __future__ import annotations

from headrace.v1 import engine_pb2, generation_pb2, timings_pb2
from services.engine import wire
from services.engine.outputs import RequestOutput, RequestUsage
from services.engine.plan import TokenLogprobs
from services.engine.request import FinishReason, Priority, QueueReason, RequestClock, RequestRefused


def opened(**fields):
    fields.setdefault("prompt_token_ids", [1, 2, 3])
    fields.setdefault("credit_count", 8)
    return wire.request_of(engine_pb2.OpenGeneration(**fields), 0, 5, 1000)


def test_unset_fields_are_off():
    """Temperature 1, no filter, no penalty, no deadline."""
    request = opened()
    assert request.sampling.temperature == 1.0
    assert (request.sampling.top_k, request.sampling.top_p, request.sampling.min_p) == (0, 1.0, 0.0)
    assert (request.max_tokens, request.deadline_ns, request.sampling.allowed_token_ids) == (None, None, None)
    assert request.priority is Priority.STANDARD


def test_every_field_arrives():
    """One of each."""
    sampling = generation_pb2.SamplingParameters(
        temperature=0.0, top_k=3, top_p=0.5, min_p=0.1, seed=-7, repetition_penalty=1.5, presence_penalty=0.5,
        frequency_penalty=-0.5, logit_bias={4: 2.0}, allowed_token_ids=[4, 5],
    )  # fmt: skip
    request = opened(
        sampling=sampling, max_tokens=9, min_tokens=2, stop_token_ids=[8], ignore_eos=True, logprobs=3,
        priority=generation_pb2.PRIORITY_INTERACTIVE, cache_salt=b"s", timeout_ns=500,
    )  # fmt: skip
    params = request.sampling
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (0.0, 3, 0.5, -7)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.5, 0.5, -0.5)
    assert (params.logit_bias, params.allowed_token_ids, params.min_tokens) == ({4: 2.0}, (4, 5), 2)
    assert params.logprobs == 3
    assert (request.max_tokens, request.stop_token_ids, request.ignore_eos) == (9, frozenset({8}), True)
    assert (request.priority, request.cache_salt) == (Priority.INTERACTIVE, b"s")
    assert (request.deadline_ns, request.credit_limit) == (1500, 8)
    assert request.prompt_ids.tolist() == [1, 2, 3]


def usage(**clock):
    return RequestUsage(3, 2, 4, RequestClock(arrival_ns=100, **clock))


def test_an_ending_carries_usage_and_account():
    """Phases by the engine's clock; gaps as percentiles."""
    clock = {"first_scheduled_ns": 150, "first_token_ns": 250, "last_token_ns": 850, "finished_ns": 860}
    output = RequestOutput(
        5, (9,), finish=FinishReason.STOP, matched_stop_id=9, usage=usage(**clock, gaps_ns=[100, 300, 200])
    )
    message = wire.output_of(output, 77, 0)
    ending, timings = message.ending, message.ending.timings
    assert (message.generation_id, list(message.token_ids)) == (77, [9])
    assert (ending.finish_reason, ending.matched_token_id) == (generation_pb2.FINISH_REASON_STOP, 9)
    assert (ending.usage.prompt_token_count, ending.usage.cached_token_count) == (3, 2)
    assert (timings.queue_ns, timings.prefill_ns, timings.decode_ns) == (50, 100, 600)
    assert (timings.inter_token_p50_ns, timings.inter_token_max_ns) == (200, 300)
    assert timings.computed_token_count == 1
    assert not message.HasField("first_token_timings")


def test_a_request_that_never_ran_has_only_a_queue():
    """No phase is invented."""
    output = RequestOutput(
        5, finish=FinishReason.DEADLINE_EXCEEDED, usage=usage(finished_ns=400, queue_reason=QueueReason.KV)
    )
    timings = wire.output_of(output, 1, 0).ending.timings
    assert timings.queue_ns == 300
    assert timings.queue_reason == timings_pb2.QUEUE_REASON_KV
    assert (timings.prefill_ns, timings.decode_ns, timings.computed_token_count) == (0, 0, 0)


def test_logprobs_stay_with_their_token():
    """One entry a token, alternatives in order."""
    output = RequestOutput(5, (9,), logprobs=(TokenLogprobs(-0.5, (9, 4), (-0.5, -1.5)),))
    (entry,) = wire.output_of(output, 1, 0).logprobs
    assert (entry.token_id, entry.logprob) == (9, -0.5)
    assert [(a.token_id, a.logprob) for a in entry.alternatives] == [(9, -0.5), (4, -1.5)]


def test_prompt_logprobs_are_those_of_answer_0():
    """Asked of answer 0 alone; one entry a token of the prompt after the first."""
    command = engine_pb2.OpenGeneration(prompt_token_ids=[1, 2, 3], credit_count=8, n=2, prompt_logprobs=0)
    asked = [wire.request_of(command, index, 5, 1000).sampling.prompt_logprobs for index in range(2)]
    assert asked == [0, None]
    output = RequestOutput(
        5, (9,), prompt_ids=(2, 3), prompt_logprobs=(TokenLogprobs(-0.5), TokenLogprobs(-1.5, (4,), (-0.25,)))
    )
    message = wire.output_of(output, 1, 0)
    assert [(entry.token_id, entry.logprob) for entry in message.prompt_logprobs] == [(2, -0.5), (3, -1.5)]
    assert [a.token_id for a in message.prompt_logprobs[1].alternatives] == [4]
    assert not message.logprobs


def test_a_refusal_is_an_ending_with_the_callers_field():
    """INVALID_ARGUMENT naming the field; shutting down is UNAVAILABLE; reasons are those of the catalogue."""
    ending = wire.refusal_of(RequestRefused("max_tokens", "KV_CAPACITY", "too large"), 3, 0).ending
    assert (ending.error_code, ending.error_reason, ending.error_field) == (3, "KV_CAPACITY", "max_tokens")
    assert wire.refusal_of(RequestRefused("top_p", "INVALID_VALUE", "x"), 3, 0).ending.error_reason == "INVALID_FIELD"
    assert wire.refusal_of(RequestRefused("", "SHUTTING_DOWN", "x"), 3, 0).ending.error_code == 14
