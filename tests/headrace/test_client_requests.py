"""Guarantees of the messages that the clients build."""

from typing import Any

import pytest

from headrace import errors
from headrace.requests import build_detokenize, build_generation, build_tokenize
from headrace.v1 import generation_pb2


def test_unset_stays_unset() -> None:
    """What is not given is not in the message, so that a default is the server's."""
    assert build_generation("hi", {}) == generation_pb2.Generation(prompt="hi")


def test_zero_is_set() -> None:
    """A zero that is given is there."""
    generation = build_generation("hi", {"temperature": 0, "top_k": 0, "seed": 0, "max_tokens": 0, "min_tokens": 0})
    for name in ("temperature", "top_k", "seed"):
        assert generation.sampling.HasField(name)
    assert generation.HasField("max_tokens")
    assert generation.HasField("min_tokens")


def test_every_option() -> None:
    """Every option finds its field."""
    generation = build_generation(
        None,
        {
            "token_ids": [1, 2],
            "model": "m",
            "n": 2,
            "logprobs": 0,
            "prompt_logprobs": 1,
            "top_p": 0.5,
            "min_p": 0.25,
            "repetition_penalty": 2.0,
            "presence_penalty": 1.0,
            "frequency_penalty": 0.5,
            "logit_bias": {7: -1.0},
            "allowed_token_ids": [7],
            "bad_words": ["x"],
            "stop": "\n",
            "stop_token_ids": [9],
            "include_stop": True,
            "ignore_eos": True,
            "priority": "batch",
            "request_id": "r",
            "metadata": {"k": "v"},
            "include_token_ids": True,
        },
    )
    sampling = generation_pb2.SamplingParameters(
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        logit_bias={7: -1.0},
        allowed_token_ids=[7],
        bad_words=["x"],
    )
    stop = generation_pb2.StopConditions(strings=["\n"], token_ids=[9], include_stop=True, ignore_eos=True)
    assert generation == generation_pb2.Generation(
        token_ids=generation_pb2.TokenIds(ids=[1, 2]),
        model="m",
        n=2,
        logprobs=0,
        prompt_logprobs=1,
        sampling=sampling,
        stop=stop,
        priority=generation_pb2.PRIORITY_BATCH,
        request_id="r",
        metadata={"k": "v"},
        include_token_ids=True,
    )


def test_empty_inputs_are_inputs() -> None:
    """Empty inputs are sent, for the server to refuse by name."""
    assert build_generation("", {}).WhichOneof("input") == "prompt"
    assert build_generation(None, {"token_ids": []}).WhichOneof("input") == "token_ids"
    assert build_generation(None, {"messages": []}).WhichOneof("input") == "chat"


def test_messages() -> None:
    """Messages are mappings or pairs; content is text, nothing, or parts."""
    parts: list[Any] = ["a", {"type": "text", "text": "b"}]
    messages: list[Any] = [("system", "s"), {"role": "user", "content": parts}, {"role": "assistant"}, ("tool", None)]
    chat = build_generation(None, {"messages": messages}).chat
    assert [message.role for message in chat.messages] == [1, 2, 3, 4]
    assert chat.messages[0].content == "s"
    assert [part.text for part in chat.messages[1].parts] == ["a", "b"]
    assert not chat.messages[2].HasField("content")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"messages": [("robot", "x")]}, "generation.chat.messages[0].role"),
        ({"messages": [("unspecified", "x")]}, "generation.chat.messages[0].role"),
        ({"messages": [("user", [{"type": "image_url"}])]}, "generation.chat.messages[0].parts[0]"),
        ({"prompt": "x", "priority": "urgent"}, "generation.priority"),
        ({"prompt": "x", "max_tokens": 2**31}, "generation.max_tokens"),
        ({"prompt": "x", "seed": 2**63}, "generation.sampling.seed"),
        ({"prompt": "x", "stop_token_ids": [2**31]}, "generation.stop.token_ids"),
        ({"prompt": "x", "logit_bias": {2**31: 1.0}}, "generation.sampling.logit_bias"),
        ({"prompt": "\ud800"}, "generation.prompt"),
        ({"token_ids": [2**31]}, "generation.token_ids.ids"),
    ],
)
def test_what_no_message_can_hold(options: Any, field: str) -> None:
    """A value that the message cannot hold is InvalidArgument, named as the server would name it."""
    prompt = options.pop("prompt", None)
    with pytest.raises(errors.InvalidArgument) as caught:
        build_generation(prompt, options)
    assert caught.value.field == field


@pytest.mark.parametrize("options", [{}, {"token_ids": [1], "messages": [("user", "x")]}])
def test_exactly_one_input(options: Any) -> None:
    """None or two inputs are a mistake in the program: TypeError."""
    with pytest.raises(TypeError, match="exactly one"):
        build_generation(None, options)
    with pytest.raises(TypeError, match="exactly one"):
        build_tokenize("x", [("user", "x")], None)


def test_unknown_argument() -> None:
    """A misspelt argument is a TypeError, as with any function."""
    options: Any = {"temprature": 0}
    with pytest.raises(TypeError, match="temprature"):
        build_generation("x", options)


def test_detokenize_range() -> None:
    """Ids that are no int32 are refused by name."""
    with pytest.raises(errors.InvalidArgument) as caught:
        build_detokenize([2**40], False, None)
    assert caught.value.field == "token_ids"
