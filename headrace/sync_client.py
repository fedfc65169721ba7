"""The client of the public API without asyncio: blocking calls, usable from any thread. Knows no service."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

import grpc

from headrace import channels, errors
from headrace.answers import Answer, Collector, Delta, answer_of, error_of
from headrace.client import DEFAULT_TARGET
from headrace.requests import MessageLike, Options, build_detokenize, build_generation, build_tokenize
from headrace.v1 import gateway_pb2, gateway_pb2_grpc

R = TypeVar("R")


class Stream:
    """One streamed answer: iterate over its deltas, then read `answer`.

    `for` ends the call when the loop is left in any way; `next` leaves it open until `close`, the end of `with`, or
    until the stream is dropped. One thread iterates; any thread may close.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
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

    def __iter__(self) -> Iterator[Delta]:
        try:
            while True:
                try:
                    delta = next(self)
                except StopIteration:
                    return
                yield delta
        finally:
            self.close()

    def __next__(self) -> Delta:
        """The next delta.

        Raises:
            StopIteration: the answer is complete.
            errors.HeadraceError: the call failed.
        """
        if self._closed:
            raise StopIteration
        try:
            for message in self._call:
                delta = self._collector.take(message)
                if delta is not None:
                    return delta
            self._collector.finish()
        except grpc.RpcError as failure:
            error = errors.Cancelled("the stream was closed") if self._closed else error_of(failure)
            self.close()
            raise error from None
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def read_all(self) -> Answer:
        """Reads to the end and returns the answer.

        Raises:
            errors.HeadraceError: the call failed.
        """
        for _ in self:
            pass
        return self.answer

    def close(self) -> None:
        """Ends the call; does nothing if it has ended."""
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            self.close()


class Client:
    """Calls a gateway with blocking calls, from any thread. One channel; any number of calls at a time.

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
            grpc.secure_channel(target, credentials, options=merged)
            if credentials is not None
            else grpc.insecure_channel(target, options=merged)
        )
        self._stub: Any = gateway_pb2_grpc.GatewayServiceStub(self._channel)

    def wait_until_connected(self, timeout: float) -> bool:
        """Connects ahead of the first call; False if nobody answered within `timeout` seconds."""
        try:
            grpc.channel_ready_future(self._channel).result(timeout=timeout)
        except grpc.FutureTimeoutError:
            return False
        return True

    def generate(self, prompt: str | None = None, **options: Unpack[Options]) -> Answer:
        """One whole answer. Arguments: see `headrace.requests.Options`.

        Raises:
            TypeError: not exactly one of prompt, messages and token_ids, or an unknown argument.
            errors.HeadraceError: the call failed; the subclass says how.
        """
        request = gateway_pb2.GenerateRequest(generation=build_generation(prompt, options))
        arguments = self._call_arguments(options.get("timeout"), options.get("headers"))
        return answer_of(_result(self._stub.Generate, request, arguments))

    def stream(self, prompt: str | None = None, **options: Unpack[Options]) -> Stream:
        """Starts an answer and gives its text as it comes.

        Raises:
            TypeError: not exactly one of prompt, messages and token_ids, or an unknown argument.
            errors.InvalidArgument: a value that no message can hold. Other errors come out of the iteration.
        """
        request = gateway_pb2.GenerateStreamRequest(generation=build_generation(prompt, options))
        arguments = self._call_arguments(options.get("timeout"), options.get("headers"))
        return Stream(self._stub.GenerateStream(request, **arguments))

    def tokenize(
        self,
        text: str | None = None,
        *,
        messages: Iterable[MessageLike] | None = None,
        model: str | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        """The token ids of a text or a conversation, as `generate` would use them. Raises errors.HeadraceError."""
        request = build_tokenize(text, messages, model)
        return list(_result(self._stub.Tokenize, request, self._call_arguments(timeout)).token_ids)

    def detokenize(
        self,
        token_ids: Iterable[int],
        *,
        include_special_tokens: bool = False,
        model: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """The text of token ids. Raises errors.HeadraceError."""
        request = build_detokenize(token_ids, include_special_tokens, model)
        return str(_result(self._stub.Detokenize, request, self._call_arguments(timeout)).text)

    def list_models(self, *, timeout: float | None = None) -> list[gateway_pb2.Model]:
        """The models that can be asked. Raises errors.HeadraceError."""
        request = gateway_pb2.ListModelsRequest()
        return list(_result(self._stub.ListModels, request, self._call_arguments(timeout)).models)

    def get_stats(self, *, timeout: float | None = None) -> gateway_pb2.GetStatsResponse:
        """What each engine is doing now. Raises errors.HeadraceError."""
        answer: gateway_pb2.GetStatsResponse = _result(
            self._stub.GetStats, gateway_pb2.GetStatsRequest(), self._call_arguments(timeout)
        )
        return answer

    def close(self) -> None:
        """Closes the channel; open calls end as cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call_arguments(self, timeout: float | None, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
        return {"timeout": timeout, "metadata": tuple({**self._headers, **(headers or {})}.items())}


def _result(method: Callable[..., R], request: Any, arguments: dict[str, Any]) -> R:
    try:
        return method(request, **arguments)
    except grpc.RpcError as failure:
        raise error_of(failure) from None
