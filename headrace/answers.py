"""What a caller gets back, made from the contract's messages. Knows no channel.

The receipt stays the contract's own `StageTimings` message (integer nanoseconds), the usage its `Usage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import grpc

from headrace import errors
from headrace.v1 import gateway_pb2, generation_pb2, timings_pb2

REQUEST_ID_KEY = "headrace-request-id"


class FinishReason(StrEnum):
    """Why an answer ended."""

    UNSPECIFIED = "unspecified"  # a word of a newer server
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the context or the KV cache


@dataclass(frozen=True, slots=True)
class Answer:
    """One whole answer, streamed or not: both give the same text for the same request."""

    text: str
    finish_reason: FinishReason
    matched_stop: str | None  # the stop string that ended it, if one did
    matched_token_id: int | None  # the stop or end-of-sequence token that ended it, if one did
    token_ids: tuple[int, ...]  # of every generated token, where include_token_ids asked for them
    usage: generation_pb2.Usage  # tokens of the prompt, cached, generated
    timings: timings_pb2.StageTimings  # the receipt, nanoseconds
    request_id: str  # the caller's own, or the server's
    trace_id: str  # 32 hexadecimal digits
    model: str
    metadata: Mapping[str, str] = field(default_factory=dict)  # the caller's labels


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of a stream. `text` may be empty where tokens made no visible text yet."""

    text: str
    token_count: int  # generated tokens that it accounts for
    token_ids: tuple[int, ...]  # their ids, where include_token_ids asked for them
    sequence_number: int  # 0, 1, 2, ... without a gap


class Collector:
    """Turns the messages of one stream into deltas and, at the end, the answer."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []

    def take(self, message: gateway_pb2.GenerateStreamResponse) -> Delta | None:
        """The delta in a message; None for the final message, after which `answer` is set."""
        if message.WhichOneof("event") == "final":
            final = message.final
            ending = final.endings[0] if final.endings else generation_pb2.Ending()
            self.answer = _answer("".join(self._texts), tuple(self._token_ids), ending, final)
            return None
        delta = message.delta
        self._texts.append(delta.text)
        self._token_ids.extend(delta.token_ids)
        return Delta(delta.text, delta.token_count, tuple(delta.token_ids), message.sequence_number)

    def finish(self) -> Answer:
        """The answer, once the stream has ended.

        Raises:
            errors.Internal: the stream ended well but without its final message.
        """
        if self.answer is None:
            raise errors.Internal("the stream ended without its final message")
        return self.answer


def answer_of(response: gateway_pb2.GenerateResponse) -> Answer:
    """The answer of a unary call."""
    first = response.answers[0] if response.answers else gateway_pb2.Answer()
    return _answer(first.text, tuple(first.token_ids), first.ending, response)


def _answer(
    text: str,
    token_ids: tuple[int, ...],
    ending: generation_pb2.Ending,
    rest: gateway_pb2.Final | gateway_pb2.GenerateResponse,
) -> Answer:
    reasons = {
        generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
        generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    }
    return Answer(
        text=text,
        finish_reason=reasons.get(ending.finish_reason, FinishReason.UNSPECIFIED),
        matched_stop=ending.matched_stop if ending.HasField("matched_stop") else None,
        matched_token_id=ending.matched_token_id if ending.HasField("matched_token_id") else None,
        token_ids=token_ids,
        usage=rest.usage,
        timings=rest.timings,
        request_id=rest.request_id,
        trace_id=rest.trace_id,
        model=rest.model,
        metadata=dict(rest.metadata),
    )


def error_of(failure: Any) -> errors.HeadraceError:
    """The typed error of a failed call: a `grpc.RpcError` of either grpc API."""
    code: grpc.StatusCode = failure.code() or grpc.StatusCode.UNKNOWN
    trailing: Iterable[tuple[str, Any]] = tuple(failure.trailing_metadata() or ())
    error = errors.from_call(code.value[0], failure.details() or "", trailing)
    if not error.request_id:
        error.request_id = next((value for key, value in trailing if key == REQUEST_ID_KEY), "")
    return error
