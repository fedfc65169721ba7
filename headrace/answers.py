"""What a caller gets back, made from the contract's messages. Knows no channel.

The receipt stays the contract's own `StageTimings` message (integer nanoseconds), the usage its `Usage`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import grpc

from headrace import errors
from headrace.v1 import gateway_pb2, generation_pb2, timings_pb2

REQUEST_ID_KEY = "headrace-request-id"
StreamMessage = gateway_pb2.GenerateStreamResponse | gateway_pb2.GenerateSessionResponse
_TRANSPORT_CODES = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


class FinishReason(StrEnum):
    """Why an answer ended."""

    UNSPECIFIED = "unspecified"  # a word of a newer server
    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, the context or the KV cache


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the n answers to one input; choice 0 is the one that n = 1 gives."""

    index: int  # 0 to n - 1
    text: str
    finish_reason: FinishReason
    matched_stop: str | None  # the stop string that ended it, if one did
    matched_token_id: int | None  # the stop or end-of-sequence token that ended it, if one did
    token_ids: tuple[int, ...]  # of every generated token, where include_token_ids asked for them
    logprobs: tuple[generation_pb2.TokenLogprob, ...]  # one a generated token, where logprobs asked for them


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request, streamed or not: both give the same. `text` and its like are those of choice 0."""

    choices: tuple[Choice, ...]  # by index; one unless n asked for more
    usage: generation_pb2.Usage  # tokens of the prompt, cached, generated over all choices
    timings: timings_pb2.StageTimings  # the receipt, nanoseconds
    request_id: str  # the caller's own, or the server's
    trace_id: str  # 32 hexadecimal digits
    model: str
    metadata: Mapping[str, str] = field(default_factory=dict)  # the caller's labels
    prompt_logprobs: tuple[generation_pb2.TokenLogprob, ...] = ()  # one a prompt token after the first, where asked for

    @property
    def text(self) -> str:
        """Text of choice 0."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why choice 0 ended."""
        return self.choices[0].finish_reason

    @property
    def matched_stop(self) -> str | None:
        """The stop string that ended choice 0, if one did."""
        return self.choices[0].matched_stop

    @property
    def matched_token_id(self) -> int | None:
        """The token that ended choice 0, if one did."""
        return self.choices[0].matched_token_id

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of choice 0, where include_token_ids asked for them."""
        return self.choices[0].token_ids

    @property
    def logprobs(self) -> tuple[generation_pb2.TokenLogprob, ...]:
        """Log probabilities of choice 0, where logprobs asked for them."""
        return self.choices[0].logprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """More text of a stream. `text` may be empty where tokens made no visible text yet."""

    text: str
    token_count: int  # generated tokens that it accounts for
    token_ids: tuple[int, ...]  # their ids, where include_token_ids asked for them
    sequence_number: int  # 0, 1, 2, ... without a gap
    index: int = 0  # of which choice
    logprobs: tuple[generation_pb2.TokenLogprob, ...] = ()  # one a token, where logprobs asked for them


class Collector:
    """Turns the messages of one stream into deltas and, at the end, the answer."""

    def __init__(self) -> None:
        self.answer: Answer | None = None
        self._deltas: dict[int, list[Delta]] = defaultdict(list)

    def take(self, message: StreamMessage) -> Delta | None:
        """The delta in a message; None for the final message, after which `answer` is set."""
        if message.WhichOneof("event") == "final":
            self.answer = _answer(message.final, [self._choice(ending) for ending in message.final.endings])
            return None
        got = message.delta
        delta = Delta(
            got.text, got.token_count, tuple(got.token_ids), message.sequence_number, got.index, tuple(got.logprobs)
        )
        self._deltas[got.index].append(delta)
        return delta

    def finish(self) -> Answer:
        """The answer, once the stream has ended.

        Raises:
            errors.Internal: the stream ended well but without its final message.
        """
        if self.answer is None:
            raise errors.Internal("the stream ended without its final message")
        return self.answer

    def _choice(self, ending: generation_pb2.Ending) -> Choice:
        deltas = self._deltas[ending.index]
        return _choice(
            "".join(delta.text for delta in deltas),
            [token for delta in deltas for token in delta.token_ids],
            [logprob for delta in deltas for logprob in delta.logprobs],
            ending,
        )


def answer_of(response: gateway_pb2.GenerateResponse) -> Answer:
    """The answer of a unary call.

    Raises:
        errors.Internal: there is none in it.
    """
    return _answer(response, [_choice(one.text, one.token_ids, one.logprobs, one.ending) for one in response.answers])


def _choice(
    text: str,
    token_ids: Iterable[int],
    logprobs: Iterable[generation_pb2.TokenLogprob],
    ending: generation_pb2.Ending,
) -> Choice:
    reasons = {
        generation_pb2.FINISH_REASON_STOP: FinishReason.STOP,
        generation_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    }
    return Choice(
        index=ending.index,
        text=text,
        finish_reason=reasons.get(ending.finish_reason, FinishReason.UNSPECIFIED),
        matched_stop=ending.matched_stop if ending.HasField("matched_stop") else None,
        matched_token_id=ending.matched_token_id if ending.HasField("matched_token_id") else None,
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
    )


def _answer(rest: gateway_pb2.Final | gateway_pb2.GenerateResponse, choices: list[Choice]) -> Answer:
    if not choices:
        raise errors.Internal("the response holds no answer")
    return Answer(
        choices=tuple(sorted(choices, key=lambda choice: choice.index)),
        usage=rest.usage,
        timings=rest.timings,
        request_id=rest.request_id,
        trace_id=rest.trace_id,
        model=rest.model,
        metadata=dict(rest.metadata),
        prompt_logprobs=tuple(rest.prompt_logprobs),
    )


def error_of(failure: Any) -> errors.HeadraceError:
    """The typed error of a failed call that its caller has not cancelled: a `grpc.RpcError` of either grpc API."""
    code: grpc.StatusCode = failure.code() or grpc.StatusCode.UNKNOWN
    if code is grpc.StatusCode.CANCELLED and by_transport(failure):  # the server went away with the call half open
        return errors.Unavailable("the connection was lost before the call had a status")
    trailing: Iterable[tuple[str, Any]] = tuple(failure.trailing_metadata() or ())
    error = errors.from_call(code.value[0], failure.details() or "", trailing)
    if not error.request_id:
        error.request_id = next((value for key, value in trailing if key == REQUEST_ID_KEY), "")
    return error


def by_transport(failure: Any) -> bool:
    """Whether a failed call says that a connection or a process is gone, and nothing about the request.

    UNAVAILABLE, and what gRPC itself makes of a broken connection: CANCELLED, UNKNOWN or INTERNAL (RST_STREAM) without
    the details that every error of ours carries.
    """
    code = failure.code()
    if code is grpc.StatusCode.UNAVAILABLE:
        return True
    ours = any(key == errors.STATUS_DETAILS_KEY for key, _ in failure.trailing_metadata() or ())
    return code in _TRANSPORT_CODES and not ours
