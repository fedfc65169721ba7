"""Builds the contract's request messages from Python arguments. Knows no channel.

What the caller does not give stays unset, so that a default is always the server's. What cannot be put into the
message at all is `InvalidArgument`, naming the field as the server would.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, cast

from headrace.errors import InvalidArgument
from headrace.session import DEFAULT_RESUME_TIMEOUT_S, DEFAULT_WINDOW, SessionOptions
from headrace.v1 import gateway_pb2, generation_pb2

Role = Literal["system", "user", "assistant", "tool"]
MessageLike = Mapping[str, Any] | tuple[str, str | None]
Priority = Literal["interactive", "standard", "batch"]

_DRAWING = ("temperature", "top_p", "top_k", "min_p", "seed")
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_PLAIN = ("model", "max_tokens", "min_tokens", "n", "logprobs", "prompt_logprobs", "request_id", "include_token_ids")


class Options(TypedDict, total=False):
    """Keyword arguments of `generate` and `stream`, beside the prompt. Each may be left out; see generation.proto.

    Exactly one of `prompt`, `messages` and `token_ids` must be given.
    """

    messages: Sequence[MessageLike]  # {"role": "user", "content": "..."} or ("user", "...")
    token_ids: Sequence[int]  # used as they are
    model: str  # left out: the only model served
    max_tokens: int  # at least 1
    min_tokens: int
    n: int  # answers to the same input
    logprobs: int  # alternatives to report with each generated token's log probability
    prompt_logprobs: int  # the same for the prompt
    temperature: float  # 0: greedy
    top_p: float
    top_k: int
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    stop: str | Sequence[str]  # texts that end the answer
    stop_token_ids: Sequence[int]
    include_stop: bool  # also send the text of the matched stop string
    ignore_eos: bool  # the model's end-of-sequence tokens do not end it
    priority: Priority
    request_id: str  # the caller's correlation id
    metadata: Mapping[str, str]  # the caller's labels, given back
    include_token_ids: bool
    timeout: float  # seconds; becomes the deadline. Left out: none
    headers: Mapping[str, str]  # gRPC metadata of this call, `traceparent` for example


class StreamOptions(Options, total=False):
    """Keyword arguments of `stream`: those of `generate`, and how the stream is kept up.

    With `resumable` or `window` the stream is a session: credits are exact, whatever the connection would swallow.
    """

    resumable: bool  # go on by itself after a lost connection or process; nothing is lost, nothing doubled
    window: int  # tokens that may be generated beyond what the caller took: 1 to 1,000,000. Left out: 64
    resume_timeout: float  # seconds without a connection after which a resumable stream fails. Left out: 60


def split_stream_options(options: StreamOptions) -> tuple[Options, SessionOptions | None]:
    """The options of the generation, and those of the session; None where the stream needs none."""
    rest = {name: value for name, value in options.items() if name in Options.__annotations__}
    unknown = options.keys() - StreamOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown arguments: {', '.join(sorted(unknown))}")
    resumable = options.get("resumable", False)
    session = SessionOptions(
        window=options.get("window", DEFAULT_WINDOW),
        resumable=resumable,
        resume_timeout_s=options.get("resume_timeout", DEFAULT_RESUME_TIMEOUT_S),
    )
    return cast("Options", rest), session if resumable or "window" in options else None


def build_generation(prompt: str | None, options: Options) -> generation_pb2.Generation:
    """The `Generation` message of a request.

    Raises:
        TypeError: not exactly one of prompt, messages and token_ids was given, or an unknown argument was.
        InvalidArgument: a value that the message cannot hold; `field` names it.
    """
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown arguments: {', '.join(sorted(unknown))}")
    given = [prompt is not None, "messages" in options, "token_ids" in options]
    if sum(given) != 1:
        raise TypeError("give exactly one of prompt, messages and token_ids")
    values: Mapping[str, Any] = options
    generation = generation_pb2.Generation()
    if prompt is not None:
        _set(generation, "prompt", prompt, "generation")
    elif "messages" in values:
        generation.chat.CopyFrom(build_chat(values["messages"], "generation.chat"))
    else:
        generation.token_ids.SetInParent()
        _extend(generation.token_ids.ids, values["token_ids"], "generation.token_ids.ids")
    for name in _PLAIN:
        if name in values:
            _set(generation, name, values[name], "generation")
    if "priority" in values:
        generation.priority = _priority(values["priority"])
    _update(generation.metadata, values.get("metadata", {}), "generation.metadata")
    _set_sampling(generation, values)
    _set_stop(generation, values)
    return generation


def build_chat(messages: Iterable[MessageLike], path: str = "chat") -> generation_pb2.Chat:
    """The `Chat` message of a conversation; `content` is text, None, or a list of parts (text or {"text": ...}).

    Raises:
        InvalidArgument: an unknown role, or content of another kind.
    """
    chat = generation_pb2.Chat()
    for number, message in enumerate(messages):
        where = f"{path}.messages[{number}]"
        role, content = message if isinstance(message, tuple) else (message.get("role"), message.get("content"))
        key = f"CHAT_ROLE_{role}".upper()
        if key not in generation_pb2.ChatRole.keys() or role == "unspecified":  # noqa: SIM118 - an enum, not a dict
            raise InvalidArgument(f"{where}.role: expected system, user, assistant or tool", field=f"{where}.role")
        built = chat.messages.add(role=generation_pb2.ChatRole.Value(key))
        if content is None:
            continue
        if isinstance(content, str):
            _set(built, "content", content, where)
            continue
        for index, part in enumerate(content):
            _add_part(built, part, f"{where}.parts[{index}]")
    return chat


def build_tokenize(
    text: str | None, messages: Iterable[MessageLike] | None, model: str | None
) -> gateway_pb2.TokenizeRequest:
    """The request of `tokenize`.

    Raises:
        TypeError: not exactly one of text and messages was given.
        InvalidArgument: a value that the message cannot hold.
    """
    if (text is None) == (messages is None):
        raise TypeError("give exactly one of text and messages")
    request = gateway_pb2.TokenizeRequest(model=model or "")
    if text is not None:
        _set(request, "text", text, "")
    if messages is not None:
        request.chat.CopyFrom(build_chat(messages))
    return request


def build_detokenize(
    token_ids: Iterable[int], include_special_tokens: bool, model: str | None
) -> gateway_pb2.DetokenizeRequest:
    """The request of `detokenize`.

    Raises:
        InvalidArgument: an id that is no int32.
    """
    request = gateway_pb2.DetokenizeRequest(model=model or "", include_special_tokens=include_special_tokens)
    _extend(request.token_ids, token_ids, "token_ids")
    return request


def _add_part(message: generation_pb2.ChatMessage, part: Any, where: str) -> None:
    text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise InvalidArgument(f"{where}: expected text", field=where)
    _set(message.parts.add(), "text", text, where)


def _set_sampling(generation: generation_pb2.Generation, values: Mapping[str, Any]) -> None:
    path = "generation.sampling"
    for name in (*_DRAWING, *_PENALTIES):
        if name in values:
            _set(generation.sampling, name, values[name], path)
    if "logit_bias" in values:
        _update(generation.sampling.logit_bias, values["logit_bias"], f"{path}.logit_bias")
    for name in ("allowed_token_ids", "bad_words"):
        if name in values:
            _extend(getattr(generation.sampling, name), values[name], f"{path}.{name}")


def _set_stop(generation: generation_pb2.Generation, values: Mapping[str, Any]) -> None:
    if "stop" in values:
        strings = [values["stop"]] if isinstance(values["stop"], str) else values["stop"]
        _extend(generation.stop.strings, strings, "generation.stop.strings")
    if "stop_token_ids" in values:
        _extend(generation.stop.token_ids, values["stop_token_ids"], "generation.stop.token_ids")
    for name in ("include_stop", "ignore_eos"):
        if name in values:
            _set(generation.stop, name, values[name], "generation.stop")


def _priority(word: str) -> Any:
    key = f"PRIORITY_{word}".upper()
    if key not in generation_pb2.Priority.keys() or word == "unspecified":  # noqa: SIM118
        path = "generation.priority"
        raise InvalidArgument(f"{path}: expected interactive, standard or batch", field=path)
    return generation_pb2.Priority.Value(key)


def _set(message: Any, name: str, value: Any, path: str) -> None:
    field = f"{path}.{name}" if path else name
    try:
        setattr(message, name, value)
    except ValueError:  # out of range, or text that is no Unicode; the value itself may be a prompt and is not shown
        raise InvalidArgument(f"{field}: out of range, or not valid text", field=field) from None


def _extend(repeated: Any, values: Iterable[Any], field: str) -> None:
    try:
        repeated.extend(values)
    except ValueError:
        raise InvalidArgument(f"{field}: an entry is out of range, or not valid text", field=field) from None


def _update(mapping: Any, values: Mapping[Any, Any], field: str) -> None:
    try:
        for key, value in values.items():
            mapping[key] = value
    except ValueError:
        raise InvalidArgument(f"{field}: an entry is out of range, or not valid text", field=field) from None
