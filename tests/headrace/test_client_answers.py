"""Guarantees of what the clients make of the contract's messages."""

from typing import Any

import pytest

from headrace import FinishReason, errors
from headrace.answers import Collector, answer_of
from headrace.v1 import gateway_pb2, generation_pb2

LOGPROB = generation_pb2.TokenLogprob(token_id=7, logprob=-0.5)


def delta(number: int, index: int, text: str) -> gateway_pb2.GenerateStreamResponse:
    inner = gateway_pb2.Delta(index=index, text=text, token_count=1, token_ids=[number], logprobs=[LOGPROB])
    return gateway_pb2.GenerateStreamResponse(sequence_number=number, delta=inner)


def ending(index: int, **fields: Any) -> generation_pb2.Ending:
    return generation_pb2.Ending(index=index, **fields)


ENDINGS = [
    ending(1, finish_reason=generation_pb2.FINISH_REASON_LENGTH),
    ending(0, finish_reason=generation_pb2.FINISH_REASON_STOP, matched_stop="!"),
]


def test_several_answers_of_one_stream() -> None:
    """Deltas of several answers come mixed; each answer gets its own text, ids and log probabilities."""
    collector = Collector()
    messages = [delta(0, 0, "a"), delta(1, 1, "x"), delta(2, 0, "b"), delta(3, 1, "y")]
    indexes = [got.index for message in messages if (got := collector.take(message)) is not None]
    assert indexes == [0, 1, 0, 1]
    final = gateway_pb2.Final(endings=ENDINGS, prompt_logprobs=[LOGPROB])
    assert collector.take(gateway_pb2.GenerateStreamResponse(sequence_number=4, final=final)) is None
    answer = collector.finish()
    assert [choice.text for choice in answer.choices] == ["ab", "xy"]
    assert [choice.token_ids for choice in answer.choices] == [(0, 2), (1, 3)]
    assert [choice.finish_reason for choice in answer.choices] == [FinishReason.STOP, FinishReason.LENGTH]
    assert answer.logprobs == (LOGPROB, LOGPROB)
    assert answer.prompt_logprobs == (LOGPROB,)
    assert (answer.text, answer.matched_stop, answer.matched_token_id) == ("ab", "!", None)


def test_unary_answers_by_index() -> None:
    """The choices of a unary answer are in the order of their index."""
    answers = [gateway_pb2.Answer(text=text, ending=end) for text, end in zip("xa", ENDINGS, strict=True)]
    answer = answer_of(gateway_pb2.GenerateResponse(answers=answers))
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a"), (1, "x")]


def test_an_unknown_finish_reason() -> None:
    """A finish reason of a newer server is UNSPECIFIED, not an error."""
    end = ending(0)
    end.MergeFromString(b"\x10\x63")  # finish_reason: 99
    answer = answer_of(gateway_pb2.GenerateResponse(answers=[gateway_pb2.Answer(ending=end)]))
    assert answer.finish_reason is FinishReason.UNSPECIFIED


def test_what_is_no_answer() -> None:
    """A stream without a final message, and a response without an answer, are faults of the server."""
    with pytest.raises(errors.Internal):
        Collector().finish()
    with pytest.raises(errors.Internal):
        answer_of(gateway_pb2.GenerateResponse())
