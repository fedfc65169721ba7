"""The receipt: one request's stages from the clocks of four processes. Knows no wire.

Each callee's account covers a part of its caller's wall time; what it does not cover is transit. No two clocks are
compared: only durations travel.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.v1 import stream_pb2, timings_pb2, tokenizer_pb2


@dataclass(slots=True)
class Stopwatch:
    """Moments of one request on the gateway's monotonic clock, in nanoseconds; 0: not reached."""

    arrived: int
    admitted: int = 0
    encoded: int = 0
    routed: int = 0
    first_received: int = 0  # the first token's message, from the stream process
    first_sent: int = 0  # handed to the caller's connection
    final_received: int = 0
    finished: int = 0


def stage_timings(
    watch: Stopwatch,
    encode: tokenizer_pb2.EncodeTimings | None,
    first: stream_pb2.FirstTokenTimings,
    final: stream_pb2.DeliverFinal,
    *,
    whole: bool,
) -> timings_pb2.StageTimings:
    """The receipt of a request that ended well.

    Of an answer that was sent whole nothing was handed over at its first token: its time to first token is the sum of
    the stages until the token was in the stream process, and the gateway's hop is accounted for at the end.

    Args:
        watch: the gateway's moments, all reached (`encoded` equals `admitted` where nothing was encoded).
        encode: the tokenizer's account, None where nothing was encoded.
        first: the relay's account up to the first token.
        final: the relay's and the engine's whole accounts.
        whole: the answer was sent at once, at its end.
    """
    timings = _accounted(final)
    timings.total_ns = watch.finished - watch.arrived
    timings.admit_ns = watch.admitted - watch.arrived
    timings.route_ns = watch.routed - watch.encoded
    timings.queue_ns = first.queue_ns
    timings.prefill_ns = first.prefill_ns
    timings.tail_ns += watch.finished - watch.final_received
    if encode is not None:
        timings.tokenize_ns = encode.total_ns
        timings.tokenize_wait_ns = encode.wait_ns
        timings.tokenize_encode_ns = encode.encode_ns
    hop_ns = (
        watch.final_received - watch.routed - final.relay_timings.total_ns
        if whole
        else watch.first_received - watch.routed - first.total_ns
    )
    timings.transit_ns = (
        (watch.encoded - watch.admitted - timings.tokenize_ns)  # gateway - tokenizer
        + hop_ns  # gateway - stream
        + (first.engine_hop_ns - first.engine_ns)  # stream - engine
    )
    timings.first_delivery_ns = (
        (first.engine_ns - first.queue_ns - first.prefill_ns)  # sampled, to published by the engine
        + (first.total_ns - first.engine_hop_ns)  # into text and out of the stream process
        + (0 if whole else watch.first_sent - watch.first_received)  # out of the gateway
    )
    timings.decode_delivery_ns = final.relay_timings.decode_ns - timings.decode_ns  # engine - stream
    if not whole:  # stream - gateway, and what the first token's handing on took while others were decoded
        relayed_ns = final.relay_timings.total_ns - first.total_ns
        handed_ns = first.total_ns - first.engine_hop_ns + watch.first_sent - watch.first_received
        timings.decode_delivery_ns += watch.final_received - watch.first_received - relayed_ns - handed_ns
    until_first_ns = (
        timings.admit_ns
        + timings.tokenize_ns
        + timings.route_ns
        + timings.transit_ns
        + timings.queue_ns
        + timings.prefill_ns
        + timings.first_delivery_ns
    )
    timings.time_to_first_token_ns = until_first_ns if whole else watch.first_sent - watch.arrived
    later_ns = timings.decode_ns + timings.decode_delivery_ns + timings.tail_ns
    timings.residual_ns = timings.total_ns - until_first_ns - later_ns
    return timings


def resumed_timings(final: stream_pb2.DeliverFinal) -> timings_pb2.StageTimings:
    """The receipt of a stream that was resumed: what the stream process and the last engine know of it."""
    timings = _accounted(final)
    timings.total_ns = final.relay_timings.total_ns
    timings.time_to_first_token_ns = timings.queue_ns + timings.prefill_ns
    timings.resume_count = max(1, final.resume_count)
    timings.residual_ns = timings.total_ns - timings.time_to_first_token_ns - timings.decode_ns - timings.tail_ns
    return timings


def _accounted(final: stream_pb2.DeliverFinal) -> timings_pb2.StageTimings:
    """What the engine and the relay say by themselves, whoever asked."""
    engine, relay = final.engine_timings, final.relay_timings
    return timings_pb2.StageTimings(
        queue_ns=engine.queue_ns,
        queue_reason=engine.queue_reason,
        prefill_ns=engine.prefill_ns,
        computed_token_count=engine.computed_token_count,
        cached_token_count=engine.cached_token_count,
        prefill_chunk_count=engine.prefill_chunk_count,
        decode_ns=engine.decode_ns,
        decode_step_count=engine.decode_step_count,
        drafted_token_count=engine.drafted_token_count,
        accepted_token_count=engine.accepted_token_count,
        inter_token_p50_ns=engine.inter_token_p50_ns,
        inter_token_p99_ns=engine.inter_token_p99_ns,
        inter_token_max_ns=engine.inter_token_max_ns,
        stalled_ns=engine.stalled_ns,
        paused_ns=engine.paused_ns,
        preempted_ns=engine.preempted_ns,
        preemption_count=engine.preemption_count,
        detokenize_ns=relay.detokenize_ns,
        send_blocked_ns=relay.send_blocked_ns,
        tail_ns=relay.tail_ns,
    )
