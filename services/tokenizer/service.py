"""The protobuf edge of the tokenizer process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc.aio
from opentelemetry.trace import Link, SpanContext

from headrace import errors
from headrace.v1 import generation_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from services.common import metric_names, names, telemetry
from services.common.calls import Call
from services.common.logs import Log
from services.common.serve import Service, StartError
from services.common.span import Span
from services.tokenizer.batcher import BatcherClosed, EncodeBatcher, Encoded, EncodeFailed, QueueFull
from services.tokenizer.chat import ChatRenderer
from services.tokenizer.inputs import (
    ChatInput,
    ChatMessage,
    EncodeInput,
    InputError,
    InputTooLarge,
    OtherPart,
    TemplateError,
    TextInput,
    TextPart,
    input_texts,
)
from services.tokenizer.lane import Worked
from services.tokenizer.settings import TokenizerSettings
from services.tokenizer.vocabulary import Vocabulary

FULL_NAME = "headrace.v1.TokenizerService"
RETRY_AFTER_S = 0.5
_ROLES = {
    generation_pb2.CHAT_ROLE_SYSTEM: "system",
    generation_pb2.CHAT_ROLE_USER: "user",
    generation_pb2.CHAT_ROLE_ASSISTANT: "assistant",
    generation_pb2.CHAT_ROLE_TOOL: "tool",
}


class TokenizerProcess(Service):
    """The tokenizer process as `serve` sees it."""

    name = "tokenizer"

    def __init__(self, settings: TokenizerSettings, telemetry_: telemetry.Telemetry, log: Log) -> None:
        self._settings = settings
        self._servicer = TokenizerServicer(settings.model.name, telemetry_)

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Adds the servicer."""
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(self._servicer, server)
        return [FULL_NAME]

    async def start(self) -> None:
        """Loads the tokenizer and encodes a word."""
        directory = self._settings.model.directory()
        try:
            vocabulary, renderer = await asyncio.to_thread(_load, directory)
        except (ValueError, OSError) as error:
            raise StartError(str(error)) from error
        await self._servicer.begin(vocabulary, renderer)

    async def stop(self) -> None:
        """Ends the encoding threads."""
        await self._servicer.end()


def _load(directory: Path) -> tuple[Vocabulary, ChatRenderer | None]:
    vocabulary = Vocabulary.load(directory)
    return vocabulary, ChatRenderer.load(directory, vocabulary)


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Encode, Decode, GetVocabulary."""

    def __init__(self, model: str, telemetry_: telemetry.Telemetry) -> None:
        self._model, self._telemetry = model, telemetry_
        self._vocabulary: Vocabulary | None = None
        self._batcher: EncodeBatcher | None = None
        self._has_template = False

    async def begin(self, vocabulary: Vocabulary, renderer: ChatRenderer | None) -> None:
        """Starts the encoding threads."""
        self._has_template = renderer is not None
        self._vocabulary, batcher = vocabulary, EncodeBatcher(vocabulary, renderer, batched=self._batched)
        await batcher.start()
        self._batcher = batcher
        metrics = self._telemetry.metrics
        metrics.each_second(lambda: metrics.set(metric_names.TOKENIZER_WAITING, batcher.waiting))

    async def end(self) -> None:
        """Ends the encoding threads."""
        if self._batcher is not None:
            await self._batcher.close()

    async def Encode(self, request: tokenizer_pb2.EncodeRequest, call: Call) -> tokenizer_pb2.EncodeResponse:  # noqa: N802
        """Ids of each input."""
        if not request.inputs:
            raise errors.InvalidArgument("inputs is an empty list; expected at least one input", field="inputs")
        inputs = [_input_of(item, position) for position, item in enumerate(request.inputs)]
        with self._working() as batcher:
            encoded = await batcher.encode_many(inputs, tag=call.span)
        self._record(inputs, encoded, call)
        ended = time.monotonic_ns()
        return tokenizer_pb2.EncodeResponse(
            encodings=[generation_pb2.TokenIds(ids=one.token_ids) for one in encoded],
            timings=tokenizer_pb2.EncodeTimings(
                total_ns=ended - call.arrival_ns,
                wait_ns=max(one.wait_ns for one in encoded),
                encode_ns=max(one.encode_ns for one in encoded),
                batch_size=max(one.batch_size for one in encoded),
            ),
        )

    async def Decode(self, request: tokenizer_pb2.DecodeRequest, call: Call) -> tokenizer_pb2.DecodeResponse:  # noqa: N802
        """Text of ids."""
        with self._working() as batcher:
            text = await batcher.decode(request.token_ids, request.include_special_tokens)
        return tokenizer_pb2.DecodeResponse(text=text)

    async def GetVocabulary(  # noqa: N802
        self, request: tokenizer_pb2.GetVocabularyRequest, call: Call
    ) -> tokenizer_pb2.GetVocabularyResponse:
        """Facts of the vocabulary."""
        if self._vocabulary is None:
            raise errors.Unavailable("the tokenizer is starting", reason=errors.Reason.STARTING)
        facts = self._vocabulary.facts
        return tokenizer_pb2.GetVocabularyResponse(
            model=self._model,
            vocabulary_size=facts.size,
            special_token_ids=facts.special_ids,
            bos_token_id=facts.bos_id,
            eos_token_ids=facts.eos_ids,
            has_chat_template=self._has_template,
            max_input_bytes=facts.max_input_bytes,
        )

    @contextmanager
    def _working(self) -> Iterator[EncodeBatcher]:
        """The batcher; its errors become statuses here."""
        if self._batcher is None:
            raise errors.Unavailable("the tokenizer is starting", reason=errors.Reason.STARTING)
        try:
            yield self._batcher
        except InputTooLarge as error:
            raise errors.InvalidArgument(
                str(error), field=_path(error), reason=errors.Reason.INPUT_TOO_LARGE
            ) from error
        except TemplateError as error:
            raise errors.InvalidArgument(str(error), field=_path(error), reason=errors.Reason.CHAT_TEMPLATE) from error
        except InputError as error:
            raise errors.InvalidArgument(str(error), field=_path(error)) from error
        except QueueFull as error:
            raise errors.ResourceExhausted(str(error), retry_after_s=RETRY_AFTER_S) from error
        except BatcherClosed as error:
            raise errors.Unavailable(str(error), reason=errors.Reason.SHUTTING_DOWN) from error
        except EncodeFailed as error:
            raise errors.Internal(str(error)) from error

    def _record(self, inputs: Sequence[EncodeInput], encoded: Sequence[Encoded], call: Call) -> None:
        metrics = self._telemetry.metrics
        for one in encoded:
            metrics.observe(metric_names.TOKENIZER_WAIT, one.wait_ns / 1e9)
            metrics.add(metric_names.TOKENIZER_TOKENS, len(one.token_ids))
        if not call.span.is_recording():
            return
        for item, one in zip(inputs, encoded, strict=True):
            began = call.arrival_ns + one.wait_ns
            attributes: dict[str, telemetry.AttributeValue] = {names.BATCH_SIZE: one.batch_size}
            links = [Link(one.batch)] if isinstance(one.batch, SpanContext) else []
            self._telemetry.phase(
                names.SPAN_TOKENIZER_WAIT,
                call.span,
                call.arrival_ns,
                began,
                attributes,
                level=telemetry.DETAILS,
                links=links,
            )
            attributes = {names.CHARACTERS: sum(map(len, input_texts(item))), names.TOKENS: len(one.token_ids)}
            self._telemetry.phase(
                names.SPAN_TOKENIZER_ENCODE,
                call.span,
                began,
                began + one.encode_ns,
                attributes,
                level=telemetry.DETAILS,
            )

    def _batched(self, tags: Sequence[object], worked: Worked) -> SpanContext | None:
        """A batch is done: counts it; of several callers' inputs makes a span that links their calls."""
        metrics = self._telemetry.metrics
        metrics.observe(metric_names.TOKENIZER_ENCODE, (worked.ended_ns - worked.began_ns) / 1e9)
        metrics.observe(metric_names.TOKENIZER_BATCH, len(tags))
        members = {id(tag): tag for tag in tags if isinstance(tag, Span)}.values()
        sampled = [span for span in members if span.sampled and span.kept]
        if len(members) < 2 or not sampled or self._telemetry.level < telemetry.DETAILS:
            return None
        context = self._telemetry.new_context(sampled=True)
        self._telemetry.phase(
            names.SPAN_TOKENIZER_BATCH,
            None,
            worked.began_ns,
            worked.ended_ns,
            {names.BATCH_SIZE: len(tags)},
            level=telemetry.DETAILS,
            links=[Link(span.context) for span in sampled],
            context=context,
        )
        return context


def _input_of(message: tokenizer_pb2.EncodeInput, position: int) -> EncodeInput:
    kind = message.WhichOneof("input")
    if kind == "text":
        return TextInput(message.text)
    if kind == "chat":
        return ChatInput([_turn_of(turn) for turn in message.chat.messages])
    path = f"inputs[{position}].input"
    raise errors.InvalidArgument(f"{path} is nothing; expected one of text, chat", field=path)


def _turn_of(message: generation_pb2.ChatMessage) -> ChatMessage:
    content: str | list[TextPart | OtherPart] | None = message.content if message.HasField("content") else None
    if message.parts:
        content = [
            TextPart(part.text) if part.WhichOneof("part") == "text" else OtherPart(part.WhichOneof("part") or "none")
            for part in message.parts
        ]
    return ChatMessage(_ROLES.get(message.role, str(message.role)), content)


def _path(error: InputError) -> str:
    """The field as the contract names it: `chat.messages[1].role`; "" where the whole input is at fault."""
    return f"chat.{error.field}" if error.field else "input"
