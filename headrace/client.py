"""The asyncio client of the public API. Knows no service; see `sync_client` for the one without asyncio.

A stream ends its call on every way out: at the end, on `break`, on an exception, when it is dropped. grpcio itself does
not cancel a call that is only forgotten, and the engine would go on generating for nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack, cast

import grpc
import grpc.aio

from headrace import channels, errors
from headrace.answers import Answer, Collector, Delta, answer_of, error_of
from headrace.requests import MessageLike, Options, build_detokenize, build_generation, build_tokenize
from headrace.v1 import gateway_pb2, gateway_pb2_grpc

DEFAULT_TARGET = "127.0.0.1:50050"
R = TypeVar("R")


class AsyncStream:
    """One streamed answer: iterate over its deltas, then read `answer`.

    `async for` ends the call when the loop is left in any way; `anext` leaves it open until `aclose`, the end of
    `async with`, or until the stream is dropped.
    """

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, gateway_pb2.GenerateStreamResponse]) -> None:
        self._call = call
        self._loop = asyncio.get_running_loop()
        self._collector = Collector()
        self._closed = False

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has ended.

        Raises:
            RuntimeError: it has not.
        """
        if self._collector.answer is None:
            raise RuntimeError("the stream has not ended; iterate over it first")
        return self._collector.answer

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while True:
                try:
                    delta = await anext(self)
                except StopAsyncIteration:
                    return
                yield delta
        finally:
            await self.aclose()

    async def __anext__(self) -> Delta:
        """The next delta.

        Raises:
            StopAsyncIteration: the answer is complete.
            errors.HeadraceError: the call failed.
        """
        if self._closed:
            raise StopAsyncIteration
        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                delta = self._collector.take(cast("gateway_pb2.GenerateStreamResponse", message))
                if delta is not None:
                    return delta
            self._collector.finish()
        except grpc.aio.AioRpcError as failure:
            await self.aclose()
            raise error_of(failure) from None
        except asyncio.CancelledError:
            if self._closed_by_another():
                raise errors.Cancelled("the stream was closed") from None
            await self.aclose()
            raise
        except BaseException:
            await self.aclose()
            raise
        await self.aclose()
        raise StopAsyncIteration

    async def read_all(self) -> Answer:
        """Reads to the end and returns the answer.

        Raises:
            errors.HeadraceError: the call failed.
        """
        async for _ in self:
            pass
        return self.answer

    async def aclose(self) -> None:
        """Ends the call; does nothing if it has ended."""
        self._closed = True
        self._call.cancel()

    def _closed_by_another(self) -> bool:
        """Whether a read was cancelled by `aclose`, and not its own task."""
        task = asyncio.current_task()
        return self._closed and task is not None and not task.cancelling()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)  # collected on whichever thread


class AsyncClient:
    """Calls a gateway from asyncio. One channel; any number of calls at a time; use it in one event loop.

    Args:
        target: host:port of the gateway.
        credentials: TLS; None: plain text.
        headers: gRPC metadata sent with every call, `authorization` for example.
        options: gRPC channel options on top of `headrace.channels.READER_OPTIONS`.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        headers: Mapping[str, str] | None = None,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self.target = target
        self._headers = dict(headers or {})
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
        call = self._stub.Generate(request, **self._call_arguments(options.get("timeout"), options.get("headers")))
        return answer_of(await _result(call))

    def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> AsyncStream:
        """Starts an answer and gives its text as it comes. Must be called while the event loop runs.

        Raises:
            TypeError: not exactly one of prompt, messages and token_ids, or an unknown argument.
            errors.InvalidArgument: a value that no message can hold. Other errors come out of the iteration.
        """
        request = gateway_pb2.GenerateStreamRequest(generation=build_generation(prompt, options))
        arguments = self._call_arguments(options.get("timeout"), options.get("headers"))
        return AsyncStream(self._stub.GenerateStream(request, **arguments))

    async def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Iterable[MessageLike] | None = None,
        model: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - it becomes the call's deadline
    ) -> list[int]:
        """The token ids of a text or a conversation, as `generate` would use them. Raises errors.HeadraceError."""
        call = self._stub.Tokenize(build_tokenize(text, messages, model), **self._call_arguments(timeout))
        return list((await _result(call)).token_ids)

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
        return str((await _result(self._stub.Detokenize(request, **self._call_arguments(timeout)))).text)

    async def list_models(self, *, timeout: float | None = None) -> list[gateway_pb2.Model]:  # noqa: ASYNC109
        """The models that can be asked. Raises errors.HeadraceError."""
        request = gateway_pb2.ListModelsRequest()
        return list((await _result(self._stub.ListModels(request, **self._call_arguments(timeout)))).models)

    async def get_stats(self, *, timeout: float | None = None) -> gateway_pb2.GetStatsResponse:  # noqa: ASYNC109
        """What each engine is doing now. Raises errors.HeadraceError."""
        call: Awaitable[gateway_pb2.GetStatsResponse] = self._stub.GetStats(
            gateway_pb2.GetStatsRequest(), **self._call_arguments(timeout)
        )
        return await _result(call)

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


async def _result(call: Awaitable[R]) -> R:
    try:
        return await call
    except grpc.aio.AioRpcError as failure:
        raise error_of(failure) from None
