"""The asyncio client of the public API. Knows no service; see `sync_client` for the one without asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
import grpc.aio

from headrace import channels
from headrace.answers import Answer, answer_of, error_of
from headrace.async_session import SessionSource
from headrace.async_stream import AsyncStream, CallSource
from headrace.credentials import Tls, channel_credentials, with_key
from headrace.requests import (
    MessageLike,
    Options,
    StreamOptions,
    build_detokenize,
    build_generation,
    build_tokenize,
    split_stream_options,
)
from headrace.retries import Retry
from headrace.session import DEFAULT_RESUME_TIMEOUT_S, DEFAULT_WINDOW, Session, SessionOptions
from headrace.v1 import gateway_pb2, gateway_pb2_grpc

DEFAULT_TARGET = "127.0.0.1:50050"


class AsyncClient:
    """Calls a gateway from asyncio. One channel; any number of calls at a time; use it in one event loop.

    Args:
        target: host:port of the gateway.
        api_key: sent with every call.
        tls: True: TLS, by the authorities of this machine; a path: by those in this file. False: plain text.
        client_certificate: paths of a certificate chain and its key that prove who calls; needs `tls`.
        credentials: gRPC's own credentials, in the place of `tls`.
        retries: further tries of a call that brought nothing, where the server says that one can help: UNAVAILABLE, and
            RESOURCE_EXHAUSTED with a time, which is waited. The timeout holds for all tries together. A session goes on
            by its own rules, see `resumable`.
        headers: gRPC metadata sent with every call.
        options: gRPC channel options on top of `headrace.channels.READER_OPTIONS`.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        api_key: str | None = None,
        tls: Tls = False,
        client_certificate: tuple[str | Path, str | Path] | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        retries: int = 0,
        headers: Mapping[str, str] | None = None,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self.target = target
        self._headers, self._retries = with_key(headers, api_key), retries
        credentials = credentials or channel_credentials(tls, client_certificate)
        merged = (*channels.READER_OPTIONS, *options)
        self._channel = (
            grpc.aio.secure_channel(target, credentials, options=merged)
            if credentials is not None
            else grpc.aio.insecure_channel(target, options=merged)
        )
        self._stub: Any = gateway_pb2_grpc.GatewayServiceStub(self._channel)

    async def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> Answer:
        """One whole answer. Arguments: see `headrace.requests.Options`.

        Raises:
            TypeError: not exactly one of prompt, messages and token_ids, or an unknown argument.
            errors.HeadraceError: the call failed; the subclass says how.
        """
        request = gateway_pb2.GenerateRequest(generation=build_generation(prompt, options))
        return answer_of(
            await self._result(self._stub.Generate, request, options.get("timeout"), options.get("headers"))
        )

    def stream(self, prompt: str | None = None, **options: Unpack[StreamOptions]) -> AsyncStream:
        """Starts an answer and gives its text as it comes. Must be called while the event loop runs.

        Arguments: see `headrace.requests.StreamOptions`.

        Raises:
            TypeError: not exactly one of prompt, messages and token_ids, or an unknown argument.
            errors.InvalidArgument: a value that no message can hold. Other errors come out of the iteration.
        """
        plain, kept_up = split_stream_options(options)
        generation = build_generation(prompt, plain)
        timeout, headers = options.get("timeout"), options.get("headers")
        if kept_up is not None:
            generation.resumable = kept_up.resumable
            return self._session(Session(generation, kept_up, timeout_s=timeout), headers)
        request = gateway_pb2.GenerateStreamRequest(generation=generation)
        retry = Retry(self._retries, timeout)

        def call() -> Any:
            return self._stub.GenerateStream(request, **self._call_arguments(retry.timeout_s(), headers))

        return AsyncStream(CallSource(call(), retry, call))

    def resume(
        self,
        stream_id: str,
        last_sequence_number: int = -1,
        *,
        window: int = DEFAULT_WINDOW,
        resume_timeout: float = DEFAULT_RESUME_TIMEOUT_S,
        timeout: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncStream:
        """Goes on with a resumable stream that this object did not begin, after a restart for example.

        Args:
            stream_id: `AsyncStream.stream_id` of then.
            last_sequence_number: of the last delta that was handled; what came after it comes again. -1: everything.
            window: see `headrace.requests.StreamOptions`.
            resume_timeout: see `headrace.requests.StreamOptions`.
            timeout: seconds; becomes the deadline. None: none.
            headers: gRPC metadata of this call.

        Raises:
            errors.InvalidArgument: a value that no message can hold. Other errors come out of the iteration:
                NotFound for an id that is unknown, expired or another tenant's, Aborted when somebody else resumes it.
        """
        kept_up = SessionOptions(window, resume_timeout_s=resume_timeout)
        session = Session(
            None, kept_up, timeout_s=timeout, stream_id=stream_id, last_sequence_number=last_sequence_number
        )
        return self._session(session, headers)

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Iterable[MessageLike] | None = None,
        model: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - it becomes the call's deadline
    ) -> list[int]:
        """The token ids of a text or a conversation, as `generate` would use them. Raises errors.HeadraceError."""
        request = build_tokenize(text, messages, model)
        return list((await self._result(self._stub.Tokenize, request, timeout)).token_ids)

    async def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        include_special_tokens: bool = False,
        model: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109
    ) -> str:
        """The text of token ids. Raises errors.HeadraceError."""
        request = build_detokenize(token_ids, include_special_tokens, model)
        return str((await self._result(self._stub.Detokenize, request, timeout)).text)

    async def list_models(self, *, timeout: float | None = None) -> list[gateway_pb2.Model]:  # noqa: ASYNC109
        """The models that can be asked. Raises errors.HeadraceError."""
        request = gateway_pb2.ListModelsRequest()
        return list((await self._result(self._stub.ListModels, request, timeout)).models)

    async def get_stats(self, *, timeout: float | None = None) -> gateway_pb2.GetStatsResponse:  # noqa: ASYNC109
        """What each engine is doing now. Raises errors.HeadraceError."""
        request = gateway_pb2.GetStatsRequest()
        answer: gateway_pb2.GetStatsResponse = await self._result(self._stub.GetStats, request, timeout)
        return answer

    def _session(self, session: Session, headers: Mapping[str, str] | None) -> AsyncStream:
        def connect(commands: AsyncIterator[gateway_pb2.GenerateSessionRequest], timeout_s: float | None) -> Any:
            return self._stub.GenerateSession(commands, **self._call_arguments(timeout_s, headers))

        return AsyncStream(SessionSource(session, connect))

    async def close(self) -> None:
        """Closes the channel; open calls end as cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _call_arguments(self, timeout: float | None, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        return {"timeout": timeout, "metadata": tuple({**self._headers, **(headers or {})}.items())}

    async def _result(
        self,
        method: Callable[..., Any],
        request: Any,
        timeout: float | None,  # noqa: ASYNC109 - it becomes the call's deadline
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        retry = Retry(self._retries, timeout)
        while True:
            try:
                return await method(request, **self._call_arguments(retry.timeout_s(), headers))
            except grpc.aio.AioRpcError as failure:
                error = error_of(failure)
                wait_s = retry.wait_s(error)
                if wait_s is None:
                    raise error from None
            await asyncio.sleep(wait_s)
