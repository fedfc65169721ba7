"""Requests and outputs between the contract's messages and the engine's own types. Knows no gRPC and no tensors."""

from __future__ import annotations

import time

import numpy as np
from google.rpc import code_pb2

from headrace import errors
from headrace.v1 import engine_pb2, generation_pb2, timings_pb2
from services.engine.memory import ResidentMemory
from services.engine.outputs import EngineStats, RequestOutput, RequestUsage
from services.engine.plan import TokenLogprobs
from services.engine.request import (
    FinishReason,
    Priority,
    QueueReason,
    Request,
    RequestRefused,
    SamplingParams,
    answer_seed,
)

_PRIORITIES = {
    generation_pb2.PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
    generation_pb2.PRIORITY_STANDARD: Priority.STANDARD,
    generation_pb2.PRIORITY_BATCH: Priority.BATCH,
}
_FINISH = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE_EXCEEDED: generation_pb2.FINISH_REASON_DEADLINE_EXCEEDED,
    FinishReason.ERROR: generation_pb2.FINISH_REASON_ERROR,
}
_QUEUE = {
    QueueReason.NONE: timings_pb2.QUEUE_REASON_UNSPECIFIED,
    QueueReason.SLOTS: timings_pb2.QUEUE_REASON_SLOTS,
    QueueReason.KV: timings_pb2.QUEUE_REASON_KV,
    QueueReason.BUDGET: timings_pb2.QUEUE_REASON_BUDGET,
    QueueReason.CREDITS: timings_pb2.QUEUE_REASON_CREDITS,
}
_SHUTTING_DOWN = "SHUTTING_DOWN"


def request_of(command: engine_pb2.OpenGeneration, index: int, request_id: int, arrival_ns: int) -> Request:
    """The engine's request for one answer of an open command; values are checked when it is added."""
    sampling = command.sampling
    given = {
        name: getattr(sampling, name)
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "seed",
        )
        if sampling.HasField(name)
    }
    if "seed" in given:
        given["seed"] = answer_seed(given["seed"], index)
    return Request(
        request_id,
        np.array(command.prompt_token_ids, dtype=np.int32),
        max_tokens=command.max_tokens if command.HasField("max_tokens") else None,
        sampling=SamplingParams(
            **given,
            logit_bias=dict(sampling.logit_bias),
            allowed_token_ids=tuple(sampling.allowed_token_ids) or None,
            bad_sequences=tuple(tuple(sequence.ids) for sequence in command.bad_token_sequences),
            min_tokens=command.min_tokens,
            logprobs=command.logprobs if command.HasField("logprobs") else None,
            prompt_logprobs=command.prompt_logprobs if command.HasField("prompt_logprobs") and not index else None,
        ),
        stop_token_ids=command.stop_token_ids,
        ignore_eos=command.ignore_eos,
        priority=_PRIORITIES.get(command.priority, Priority.STANDARD),
        cache_salt=command.cache_salt,
        fair_key=command.fair_key,
        fair_weight=command.fair_weight or 1.0,
        deadline_ns=arrival_ns + command.timeout_ns if command.HasField("timeout_ns") else None,
        credit_limit=command.credit_count,
        arrival_ns=arrival_ns,
        generated_ids=np.array(command.generated_token_ids, dtype=np.int32),
    )


def ended_before(
    request: Request, facts: engine_pb2.GetEngineResponse, generation_id: int
) -> engine_pb2.GenerationOutput | None:
    """The ending of a resumed request that its earlier run had finished without telling; None if it had not."""
    if not request.resumed_count:
        return None
    last = int(request.output_ids[-1])
    eos = last in facts.eos_token_ids and not request.ignore_eos
    room = min(facts.context_length - request.prompt_count, facts.kv_token_capacity - request.prompt_count + 1)
    message = engine_pb2.GenerationOutput(generation_id=generation_id)
    if (eos or last in request.stop_token_ids) and request.resumed_count > request.sampling.min_tokens:
        message.ending.finish_reason = generation_pb2.FINISH_REASON_STOP
        message.ending.matched_token_id = last
    elif request.resumed_count >= min(room, request.max_tokens if request.max_tokens is not None else room):
        message.ending.finish_reason = generation_pb2.FINISH_REASON_LENGTH
    else:
        return None
    message.ending.usage.prompt_token_count = request.prompt_count
    message.ending.usage.completion_token_count = request.resumed_count
    return message


def output_of(output: RequestOutput, generation_id: int, index: int) -> engine_pb2.GenerationOutput:
    """The contract's message for one answer's news of one step."""
    message = engine_pb2.GenerationOutput(generation_id=generation_id, index=index, token_ids=output.token_ids)
    message.logprobs.extend(map(_logprob_of, output.token_ids, output.logprobs or ()))
    message.prompt_logprobs.extend(map(_logprob_of, output.prompt_ids or (), output.prompt_logprobs or ()))
    usage = output.usage
    if usage is not None and output.token_ids and usage.clock.first_token_ns == usage.clock.last_token_ns:
        message.first_token_timings.CopyFrom(timings_of(usage))
    if output.finish is not None:
        ending = message.ending
        ending.finish_reason = _FINISH[output.finish]
        if output.matched_stop_id is not None:
            ending.matched_token_id = output.matched_stop_id
        if output.error is not None:
            ending.error_code = code_pb2.INTERNAL
            ending.error_reason = "INTERNAL"
            ending.error_message = output.error
        if usage is not None:
            ending.usage.prompt_token_count = usage.prompt_token_count
            ending.usage.cached_token_count = usage.cached_token_count
            ending.usage.completion_token_count = usage.output_token_count
            ending.timings.CopyFrom(timings_of(usage))
    return message


def _logprob_of(token_id: int, logprobs: TokenLogprobs) -> generation_pb2.TokenLogprob:
    alternatives = [
        generation_pb2.TokenAlternative(token_id=top_id, logprob=logprob)
        for top_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    ]
    return generation_pb2.TokenLogprob(token_id=token_id, logprob=logprobs.logprob, alternatives=alternatives)


def refusal_of(refusal: RequestRefused, generation_id: int, index: int) -> engine_pb2.GenerationOutput:
    """The ending of an answer that the engine refused; the field is the engine's name for it."""
    message = engine_pb2.GenerationOutput(generation_id=generation_id, index=index)
    message.ending.finish_reason = generation_pb2.FINISH_REASON_ERROR
    shutting_down = refusal.reason == _SHUTTING_DOWN
    message.ending.error_code = code_pb2.UNAVAILABLE if shutting_down else code_pb2.INVALID_ARGUMENT
    known = refusal.reason in errors.Reason.__members__
    message.ending.error_reason = refusal.reason if known else errors.Reason.INVALID_FIELD
    message.ending.error_field = refusal.field
    message.ending.error_message = str(refusal)
    return message


def timings_of(usage: RequestUsage) -> engine_pb2.EngineTimings:
    """The engine's account of a request, up to now; phases that it never reached are zero."""
    clock, now = usage.clock, time.monotonic_ns()
    scheduled = clock.first_scheduled_ns
    timings = engine_pb2.EngineTimings(
        total_ns=now - clock.arrival_ns,
        queue_ns=(scheduled or clock.finished_ns or now) - clock.arrival_ns,
        queue_reason=_QUEUE[clock.queue_reason],
        computed_token_count=usage.prompt_token_count - usage.cached_token_count if scheduled else 0,
        cached_token_count=usage.cached_token_count,
        prefill_chunk_count=clock.prefill_chunk_count,
        stalled_ns=clock.stalled_ns,
        paused_ns=clock.paused_ns,
        preempted_ns=clock.preempted_ns,
        preemption_count=clock.preemption_count,
        recomputed_token_count=clock.recomputed_token_count,
        decode_step_count=clock.decode_step_count,
        drafted_token_count=clock.drafted_token_count,
        accepted_token_count=clock.accepted_token_count,
    )
    if clock.first_token_ns:
        timings.prefill_ns = clock.first_token_ns - scheduled
        timings.decode_ns = clock.last_token_ns - clock.first_token_ns
        timings.inter_token_p50_ns = clock.gap_ns(0.5)
        timings.inter_token_p99_ns = clock.gap_ns(0.99)
        timings.inter_token_max_ns = clock.gap_ns(1.0)
    return timings


def stats_of(stats: EngineStats, resident: ResidentMemory, open_stream_count: int) -> engine_pb2.EngineStats:
    """The contract's message for the engine's gauges and totals."""
    return engine_pb2.EngineStats(
        running_count=stats.running_count,
        waiting_count=stats.waiting_count,
        paused_count=stats.paused_count,
        open_stream_count=open_stream_count,
        kv_total_block_count=stats.kv_block_total,
        kv_free_block_count=stats.kv_block_free,
        kv_cached_block_count=stats.kv_block_cached,
        preemption_count=stats.preemption_count,
        prefilled_token_count=stats.prefilled_token_count,
        decoded_token_count=stats.decoded_token_count,
        step_count=stats.step_count,
        kv_wasted_token_count=stats.kv_wasted_token_count,
        drafted_token_count=stats.drafted_token_count,
        accepted_token_count=stats.accepted_token_count,
        resident_bytes=resident.total_bytes,
        resident_file_bytes=resident.file_bytes,
        resident_weight_bytes=resident.weight_bytes,
        resident_kv_bytes=resident.kv_bytes,
    )
