"""Messages to the gateway from relays and the engine's endings. Knows no gRPC."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from google.rpc import code_pb2

from headrace import errors
from headrace.v1 import engine_pb2, generation_pb2, stream_pb2
from services.stream.relay import Piece, Relay

TokenBytes = Callable[[int], bytes]


def delta_of(piece: Piece, index: int, *, include_ids: bool) -> stream_pb2.DeliverDelta:
    """One message of one answer."""
    return stream_pb2.DeliverDelta(
        index=index,
        text=piece.text,
        token_count=len(piece.token_ids),
        token_ids=piece.token_ids if include_ids else (),
        logprobs=piece.logprobs,
    )


def with_bytes(
    logprobs: Iterable[generation_pb2.TokenLogprob], token_bytes: TokenBytes
) -> Iterable[generation_pb2.TokenLogprob]:
    """The same entries with the bytes of their tokens, which the engine does not know."""
    for entry in logprobs:
        entry.token_bytes = token_bytes(entry.token_id)
        for alternative in entry.alternatives:
            alternative.token_bytes = token_bytes(alternative.token_id)
        yield entry


def ending_of(ending: engine_pb2.GenerationEnding, relay: Relay, index: int) -> generation_pb2.Ending:
    """How one answer ended. Raises the error that an answer without an ending of its own ended with."""
    matched = relay.matched_stop
    message = generation_pb2.Ending(
        index=index,
        finish_reason=ending.finish_reason if matched is None else generation_pb2.FINISH_REASON_STOP,
        matched_stop=matched,
        completion_token_count=relay.statistics.token_count,
    )
    if matched is not None:
        return message
    if ending.finish_reason == generation_pb2.FINISH_REASON_DEADLINE_EXCEEDED:
        raise errors.DeadlineExceeded("the deadline has passed")
    if ending.finish_reason == generation_pb2.FINISH_REASON_CANCELLED:
        raise errors.Cancelled("the generation was cancelled")
    if ending.finish_reason == generation_pb2.FINISH_REASON_ERROR:
        kind = errors.BY_CODE.get(ending.error_code or code_pb2.INTERNAL, errors.Internal)
        raise kind(ending.error_message, reason=ending.error_reason, field=ending.error_field)
    if ending.HasField("matched_token_id"):
        message.matched_token_id = ending.matched_token_id
    return message


def engine_gave_up(ending: engine_pb2.GenerationEnding) -> bool:
    """Whether the engine ended a generation that another engine could go on with."""
    if ending.finish_reason == generation_pb2.FINISH_REASON_ERROR:
        return bool(ending.error_code == code_pb2.UNAVAILABLE)
    return bool(ending.finish_reason == generation_pb2.FINISH_REASON_CANCELLED)


def engine_account(endings: Sequence[engine_pb2.GenerationEnding]) -> engine_pb2.EngineTimings:
    """The account of several answers as one: of the one that ended last, decoding since the first token of any."""
    accounts = [ending.timings for ending in endings]
    first_token_ns = min(account.queue_ns + account.prefill_ns for account in accounts)
    last = max(accounts, key=lambda account: account.queue_ns + account.prefill_ns + account.decode_ns)
    merged = engine_pb2.EngineTimings()
    merged.CopyFrom(last)
    merged.decode_ns = last.queue_ns + last.prefill_ns + last.decode_ns - first_token_ns
    merged.computed_token_count = accounts[0].computed_token_count
    merged.cached_token_count = accounts[0].cached_token_count
    merged.decode_step_count = max(account.decode_step_count for account in accounts)
    merged.preemption_count = sum(account.preemption_count for account in accounts)
    merged.drafted_token_count = sum(account.drafted_token_count for account in accounts)
    merged.accepted_token_count = sum(account.accepted_token_count for account in accounts)
    return merged
