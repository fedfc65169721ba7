"""Checks every number and name of a request before anything is allocated for it.

The limits are those that protos/headrace/v1/generation.proto states. Each refusal names the field by its path and says
the value and what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NoReturn

from headrace import channels
from headrace.errors import InvalidArgument, Reason
from headrace.v1 import generation_pb2
from headrace.v1.generation_pb2 import Generation, SamplingParameters

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED = 4096
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 256
MAX_CREDITS = 1_000_000  # of one grant
MAX_REQUEST_ID = 128
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 256


def check_generation(generation: Generation, vocabulary_size: int, context_length: int) -> None:
    """Checks a whole request.

    Args:
        generation: as it came.
        vocabulary_size: token ids lie below it.
        context_length: of the model, in tokens.

    Raises:
        InvalidArgument: a field is wrong; the first one found.
    """
    size = generation.ByteSize()
    if size > channels.MAX_REQUEST_BYTES:
        _refuse("generation", f"{size} bytes", f"at most {channels.MAX_REQUEST_BYTES} bytes", Reason.INPUT_TOO_LARGE)
    check_input(generation, vocabulary_size, context_length, "generation")
    _check_lengths(generation)
    check_sampling(generation.sampling, vocabulary_size, "generation.sampling")
    _check_bad_words(generation.sampling.bad_words, "generation.sampling.bad_words")
    _check_stop(generation.stop, vocabulary_size, "generation.stop")
    _check_labels(generation)


def check_input(generation: Generation, vocabulary_size: int, context_length: int, path: str) -> None:
    """Checks that there is exactly one input, and that it can be encoded."""
    kind = generation.WhichOneof("input")
    if kind is None:
        _refuse(f"{path}.input", "nothing", "one of prompt, chat, token_ids")
    if kind == "token_ids":
        if not generation.token_ids.ids:
            _refuse(f"{path}.token_ids.ids", "an empty list", "at least one token", Reason.EMPTY_PROMPT)
        check_token_ids(generation.token_ids.ids, vocabulary_size, f"{path}.token_ids.ids")
    elif kind == "chat":
        check_chat(generation.chat, context_length, f"{path}.chat")
    else:
        check_text_size(len(generation.prompt.encode()), context_length, f"{path}.prompt")


def check_chat(chat: generation_pb2.Chat, context_length: int, path: str) -> None:
    """Checks roles and parts; the template has its own say later."""
    if not chat.messages:
        _refuse(f"{path}.messages", "an empty list", "at least one message")
    size = 0
    for position, message in enumerate(chat.messages):
        here = f"{path}.messages[{position}]"
        if message.role not in generation_pb2.ChatRole.values()[1:]:
            _refuse(f"{here}.role", message.role, "system, user, assistant or tool")
        if message.parts and message.HasField("content"):
            _refuse(here, "both content and parts", "one of them")
        for number, part in enumerate(message.parts):
            if part.WhichOneof("part") != "text":
                _refuse(f"{here}.parts[{number}]", part.WhichOneof("part") or "nothing", "text")
            size += len(part.text.encode())
        size += len(message.content.encode())
    check_text_size(size, context_length, path)


def check_text_size(size_bytes: int, context_length: int, path: str) -> None:
    """Refuses text that cannot fit, before it is encoded."""
    most = 16 * context_length
    if size_bytes > most:
        _refuse(path, f"{size_bytes} bytes", f"at most {most} bytes, 16 a token of context", Reason.INPUT_TOO_LARGE)


def check_token_ids(ids: Sequence[int], vocabulary_size: int, path: str) -> None:
    """Checks that each id lies in [0, vocabulary_size)."""
    if ids and (min(ids) < 0 or max(ids) >= vocabulary_size):
        position = next(i for i, token in enumerate(ids) if not 0 <= token < vocabulary_size)
        _refuse(f"{path}[{position}]", ids[position], f"a token id from 0 to {vocabulary_size - 1}")


def _check_lengths(generation: Generation) -> None:
    if generation.HasField("max_tokens") and generation.max_tokens < 1:
        _refuse("generation.max_tokens", generation.max_tokens, "at least 1")
    if generation.min_tokens < 0:
        _refuse("generation.min_tokens", generation.min_tokens, "at least 0")
    if generation.HasField("max_tokens") and generation.min_tokens > generation.max_tokens:
        _refuse("generation.min_tokens", generation.min_tokens, f"at most max_tokens, {generation.max_tokens}")
    if generation.HasField("n") and not 1 <= generation.n <= MAX_N:
        _refuse("generation.n", generation.n, f"1 to {MAX_N}")
    if generation.resumable and generation.n > 1:
        _refuse("generation.resumable", f"true with n {generation.n}", "n 1: only a single answer can be resumed")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(generation, name)
        if not 0 <= value <= MAX_LOGPROBS:
            _refuse(f"generation.{name}", value, f"0 to {MAX_LOGPROBS}")


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda v: 0 <= v <= 100, "0 to 100"),
    "top_p": (lambda v: 0 < v <= 1, "more than 0, at most 1"),
    "top_k": (lambda v: v >= -1, "-1 or 0 for off, or at least 1"),
    "min_p": (lambda v: 0 <= v <= 1, "0 to 1"),
    "repetition_penalty": (lambda v: 0 < v <= 10, "more than 0, at most 10"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "-2 to 2"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "-2 to 2"),
}


def check_sampling(sampling: SamplingParameters, vocabulary_size: int, path: str) -> None:
    """Checks each number; NaN and infinities fail every range."""
    for name, (allowed, wanted) in _RANGES.items():
        if sampling.HasField(name):
            value = getattr(sampling, name)
            if not math.isfinite(value) or not allowed(value):
                _refuse(f"{path}.{name}", value, wanted)
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        _refuse(f"{path}.logit_bias", f"{len(sampling.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS}")
    for token, bias in sampling.logit_bias.items():
        if not 0 <= token < vocabulary_size:
            _refuse(f"{path}.logit_bias", f"for token {token}", f"a token id from 0 to {vocabulary_size - 1}")
        if not -100 <= bias <= 100:  # also false for NaN
            _refuse(f"{path}.logit_bias[{token}]", bias, "-100 to 100")
    if len(sampling.allowed_token_ids) > MAX_ALLOWED:
        _refuse(f"{path}.allowed_token_ids", f"{len(sampling.allowed_token_ids)} ids", f"at most {MAX_ALLOWED}")
    check_token_ids(sampling.allowed_token_ids, vocabulary_size, f"{path}.allowed_token_ids")


def _check_bad_words(words: Sequence[str], path: str) -> None:
    if len(words) > MAX_BAD_WORDS:
        _refuse(path, f"{len(words)} words", f"at most {MAX_BAD_WORDS}")
    for position, word in enumerate(words):
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS:
            _refuse(f"{path}[{position}]", f"{len(word)} characters", f"1 to {MAX_BAD_WORD_CHARACTERS} characters")


def _check_stop(stop: generation_pb2.StopConditions, vocabulary_size: int, path: str) -> None:
    if len(stop.strings) > MAX_STOP_STRINGS:
        _refuse(f"{path}.strings", f"{len(stop.strings)} strings", f"at most {MAX_STOP_STRINGS}")
    for position, text in enumerate(stop.strings):
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            _refuse(f"{path}.strings[{position}]", f"{len(text)} characters", f"1 to {MAX_STOP_CHARACTERS} characters")
    if len(stop.token_ids) > MAX_STOP_TOKENS:
        _refuse(f"{path}.token_ids", f"{len(stop.token_ids)} ids", f"at most {MAX_STOP_TOKENS}")
    check_token_ids(stop.token_ids, vocabulary_size, f"{path}.token_ids")


def _check_labels(generation: Generation) -> None:
    if generation.priority not in generation_pb2.Priority.values():
        _refuse("generation.priority", generation.priority, "a value of Priority")
    if len(generation.request_id) > MAX_REQUEST_ID:
        _refuse("generation.request_id", f"{len(generation.request_id)} characters", f"at most {MAX_REQUEST_ID}")
    if len(generation.metadata) > MAX_METADATA:
        _refuse("generation.metadata", f"{len(generation.metadata)} entries", f"at most {MAX_METADATA}")
    for key, value in generation.metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            _refuse(
                "generation.metadata",
                f"an entry of {len(key)} + {len(value)} characters",
                f"at most {MAX_METADATA_KEY} + {MAX_METADATA_VALUE}",
            )


def check_credits(credit_count: int, path: str) -> None:
    """Checks one grant of credits."""
    if not 1 <= credit_count <= MAX_CREDITS:
        _refuse(path, credit_count, f"1 to {MAX_CREDITS}")


def _refuse(path: str, value: object, wanted: str, reason: str = Reason.INVALID_FIELD) -> NoReturn:
    raise InvalidArgument(f"{path} is {value}; expected {wanted}", field=path, reason=reason)


_ENGINE_PATHS = {"stop_token_ids": "stop.token_ids", "bad_sequences": "sampling.bad_words"}
_INPUT_FIELDS = ("prompt", "input")


def contract_path(field: str, generation: Generation) -> str:
    """Path in the contract of a field that the tokenizer or the engine named in its own words.

    `chat.messages[0].role` of the tokenizer, `prompt` or `temperature` of the engine, and their like.
    """
    if not field or field.startswith("generation"):
        return field
    if field in _INPUT_FIELDS:
        return f"generation.{generation.WhichOneof('input')}"
    if field in SamplingParameters.DESCRIPTOR.fields_by_name:
        return f"generation.sampling.{field}"
    return f"generation.{_ENGINE_PATHS.get(field, field)}"
