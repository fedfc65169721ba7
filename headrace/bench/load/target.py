"""Where requests go: an interface, and the pipeline's own gRPC API behind it.

The gRPC target speaks over bare stubs: a client object a request costs more than the request itself, and what the tool
costs is not the server's. The first message of an answer and its end are the only ones that it reads whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import grpc.aio

from headrace import channels, errors
from headrace.answers import error_of
from headrace.bench.load.spec import Conversation, Turn
from headrace.bench.records import Record
from headrace.credentials import with_key
from headrace.requests import Options, build_generation
from headrace.v1 import gateway_pb2, gateway_pb2_grpc

CONNECTIONS = 4  # of a client process


class RequestFailed(Exception):
    """A request failed; `code` is a short name of how."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Stream(Protocol):
    """An answer under way."""

    token_ids: list[int]  # of the answer so far, where they were asked for

    async def read(self) -> int | None:
        """Tokens in the next message, 0 in one without; None: the answer is complete. Raises RequestFailed."""

    def finish(self, record: Record) -> None:
        """Writes what the complete answer says of itself into the record."""

    def cancel(self) -> None:
        """Ends it."""


class Target(Protocol):
    """A server under test, as one client process sees it."""

    async def __aenter__(self) -> Self:
        """Connects. Raises RequestFailed."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnects."""

    def open(self, turn: Turn, token_ids: Sequence[int], conversation: Conversation) -> Stream:
        """Sends a request: `token_ids` is the whole prompt of the turn."""


class GrpcTarget:
    """A gateway.

    Args:
        address: its host:port.
        keys: API key of each tenant.
        timeout_s: deadline of a request.
    """

    def __init__(self, address: str, keys: Mapping[str, str], timeout_s: float) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._metadata = {
            tenant: tuple(with_key(None, key).items()) for tenant, key in ({None: None} | dict(keys)).items()
        }
        self._channels: list[grpc.aio.Channel] = []
        self._calls: list[Any] = []

    async def __aenter__(self) -> Self:
        options = (*channels.READER_OPTIONS, *channels.OWN_CONNECTION)
        self._channels = [grpc.aio.insecure_channel(self._address, options=options) for _ in range(CONNECTIONS)]
        for channel in self._channels:
            stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
            self._calls.append(stub.GenerateStream)
            try:
                await stub.ListModels(gateway_pb2.ListModelsRequest(), metadata=next(reversed(self._metadata.values())))
            except grpc.aio.AioRpcError as failure:
                raise _failed(failure) from None
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            await channel.close()

    def open(self, turn: Turn, token_ids: Sequence[int], conversation: Conversation) -> GrpcStream:
        """See `Target`. Greedy, to the full length, whatever the tokens are."""
        options = Options(token_ids=token_ids, max_tokens=turn.output, temperature=0.0, ignore_eos=True)
        if len(conversation.turns) > 1:
            options["include_token_ids"] = True
        if conversation.priority is not None:
            options["priority"] = conversation.priority  # type: ignore[typeddict-item]
        request = gateway_pb2.GenerateStreamRequest(generation=build_generation(None, options))
        call = self._calls[conversation.number % len(self._calls)]
        return GrpcStream(call(request, timeout=self._timeout_s, metadata=self._metadata[conversation.tenant]))


class GrpcStream:
    """See `Stream`."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._final: gateway_pb2.Final | None = None
        self.token_ids: list[int] = []

    async def read(self) -> int | None:
        """See `Stream`."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as failure:
            raise _failed(failure) from None
        if message is grpc.aio.EOF:
            if self._final is None:
                raise RequestFailed(errors.Internal.__name__, "the stream ended without its final message")
            return None
        if message.HasField("final"):
            self._final = message.final
            return 0
        self.token_ids += message.delta.token_ids
        return int(message.delta.token_count)

    def finish(self, record: Record) -> None:
        """See `Stream`."""
        final = self._final
        if final is None:
            raise RuntimeError("the answer is not complete")
        record.prompt_tokens = final.usage.prompt_token_count
        record.cached_tokens = final.usage.cached_token_count
        record.output_tokens = final.usage.completion_token_count
        record.request_id, record.trace_id = final.request_id, final.trace_id
        record.receipt = {field.name: value for field, value in final.timings.ListFields()}

    def cancel(self) -> None:
        """See `Stream`."""
        self._call.cancel()


def _failed(failure: grpc.aio.AioRpcError) -> RequestFailed:
    error = error_of(failure)
    return RequestFailed(type(error).__name__, error.message)
