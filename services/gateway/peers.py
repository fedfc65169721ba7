"""The processes that the gateway calls. With `service`, the only file here that speaks gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio
from opentelemetry.trace import Span, SpanKind

from headrace.aio_writes import protect
from headrace.errors import HeadraceError
from headrace.v1 import (
    engine_pb2,
    engine_pb2_grpc,
    stream_pb2,
    stream_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)
from services.common import names, telemetry
from services.common.calls import peer_error
from services.common.dial import open_channel, wait_for, wait_until_serving, watch_health
from services.common.logs import Log
from services.common.registry import Registry, repeat
from services.gateway.router import Engine, Router
from services.gateway.settings import PeerSettings

STATS_TIMEOUT_S = 2.0
Credentials = grpc.ChannelCredentials | None  # of every channel; None: plain text


class Tokenizer:
    """Encodes and decodes."""

    def __init__(self, address: str, credentials: Credentials, telemetry_: telemetry.Telemetry) -> None:
        self.channel = open_channel(address, credentials)
        self.address, self._telemetry = address, telemetry_
        self._stub = tokenizer_pb2_grpc.TokenizerServiceStub(self.channel)

    async def encode(
        self, inputs: Sequence[tokenizer_pb2.EncodeInput], parent: Span, timeout_s: float | None
    ) -> tokenizer_pb2.EncodeResponse:
        """Ids of each input. Raises HeadraceError."""
        with _client_span(self._telemetry, "headrace.v1.TokenizerService/Encode", parent) as span:
            with _errors_of("tokenizer", self.address):
                response: tokenizer_pb2.EncodeResponse = await self._stub.Encode(
                    tokenizer_pb2.EncodeRequest(inputs=inputs), timeout=timeout_s, metadata=_headers(span)
                )
            return response

    async def decode(
        self, token_ids: Sequence[int], parent: Span, timeout_s: float | None, *, include_special_tokens: bool
    ) -> str:
        """Text of ids. Raises HeadraceError."""
        with _client_span(self._telemetry, "headrace.v1.TokenizerService/Decode", parent) as span:
            request = tokenizer_pb2.DecodeRequest(token_ids=token_ids, include_special_tokens=include_special_tokens)
            with _errors_of("tokenizer", self.address):
                return str((await self._stub.Decode(request, timeout=timeout_s, metadata=_headers(span))).text)


class Delivery:
    """One open `Deliver` call. Async iteration gives its messages; `grant` sends credits back."""

    def __init__(self, call: grpc.aio.StreamStreamCall, address: str) -> None:  # type: ignore[type-arg]
        self._call, self._address = call, address

    async def messages(self) -> AsyncIterator[stream_pb2.DeliverResponse]:
        """The messages, up to the final one. Raises HeadraceError."""
        with _errors_of("stream process", self._address):
            async for message in self._call:
                yield message

    async def grant(self, credit_count: int, index: int) -> None:
        """The reader took this many tokens of an answer; a call that has ended needs no credits."""
        taken = stream_pb2.DeliverCredits(credit_count=credit_count, index=index)
        await self._tell(stream_pb2.DeliverRequest(credits=taken))

    async def cancel(self) -> None:
        """Ends the generation for good; the messages end with CANCELLED."""
        await self._tell(stream_pb2.DeliverRequest(cancel=stream_pb2.DeliverCancel()))

    async def _tell(self, command: stream_pb2.DeliverRequest) -> None:
        with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
            await self._call.write(command)


class Relays:
    """Opens deliveries in the stream process."""

    def __init__(self, address: str, credentials: Credentials, telemetry_: telemetry.Telemetry) -> None:
        self.channel = open_channel(address, credentials)
        self.address, self._telemetry = address, telemetry_
        self._stub = stream_pb2_grpc.StreamServiceStub(self.channel)

    @contextlib.asynccontextmanager
    async def deliver(
        self, command: stream_pb2.DeliverRequest, parent: Span, timeout_s: float | None
    ) -> AsyncIterator[Delivery]:
        """An open delivery; leaving the block, however, cancels it where it has not ended."""
        with _client_span(self._telemetry, "headrace.v1.StreamService/Deliver", parent) as span:
            call = protect(self._stub.Deliver(timeout=timeout_s, metadata=_headers(span)))
            try:
                with _errors_of("stream process", self.address):
                    await call.write(command)
                yield Delivery(call, self.address)
            finally:
                call.cancel()


class Engines:
    """Asks engines for facts and state, and keeps the router informed."""

    def __init__(self, router: Router, credentials: Credentials, log: Log, registry: Registry | None = None) -> None:
        self._router, self._credentials, self._log, self._registry = router, credentials, log, registry
        self._found: dict[str, asyncio.Task[None]] = {}
        self.channels = {address: open_channel(address, credentials) for address in router.engines}
        self._stubs = {address: engine_pb2_grpc.EngineServiceStub(c) for address, c in self.channels.items()}
        self.first_serving = asyncio.Event()

    async def watch(self) -> None:
        """Follows the health of every engine, for ever."""
        async with asyncio.TaskGroup() as group:
            for engine in self._router.engines.values():
                group.create_task(self._watch(engine))
            if self._registry is not None:
                group.create_task(repeat(lambda: self._find(group), "find engines", self._log))

    async def _find(self, group: asyncio.TaskGroup) -> None:
        """Takes up engines that have registered, and leaves those whose lease has ended. Raises SharedStateLost."""
        if self._registry is None:
            return
        registered = await self._registry.addresses()
        for address in registered:
            if address not in self._router.engines:
                self.channels[address] = open_channel(address, self._credentials)
                self._stubs[address] = engine_pb2_grpc.EngineServiceStub(self.channels[address])
                self._router.engines[address] = engine = Engine(address)
                self._found[address] = group.create_task(self._watch(engine))
        for address in set(self._found) - set(registered):
            engine = self._router.engines[address]
            if not engine.serving and not engine.open_count:  # a lease may end because Redis forgot it
                self._found.pop(address).cancel()
                del self._router.engines[address], self._stubs[address]
                await self.channels.pop(address).close()

    async def _watch(self, engine: Engine) -> None:
        changes: asyncio.Queue[bool] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            group.create_task(watch_health(self.channels[engine.address], changes.put_nowait))
            while True:
                serving = await changes.get()
                if serving:
                    serving = await self._learn(engine)
                if serving != engine.serving:
                    self._log.info("engine", address=engine.address, serving=serving)
                if not serving:
                    self._router.index.forget(engine.address)
                    engine.draining = False
                engine.serving = serving
                if serving:
                    self.first_serving.set()

    async def _learn(self, engine: Engine) -> bool:
        try:
            engine.facts = await self._stubs[engine.address].GetEngine(
                engine_pb2.GetEngineRequest(), timeout=STATS_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            self._log.warning("engine does not answer", address=engine.address, reason=error.details())
            return False
        return True

    async def tell(self, address: str, verb: str, request: object, timeout_s: float | None) -> Any:
        """An engine's answer to one of its verbs, by name. Raises HeadraceError."""
        with _errors_of("engine", address):
            return await getattr(self._stubs[address], verb)(request, timeout=timeout_s)

    async def stats(self, address: str) -> engine_pb2.EngineStats | None:
        """What an engine is doing now; None where it does not answer."""
        stub = self._stubs.get(address)
        if stub is None:  # it has just been left
            return None
        try:
            answer = await stub.GetStats(engine_pb2.EngineServiceGetStatsRequest(), timeout=STATS_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
        stats: engine_pb2.EngineStats = answer.stats
        return stats


class Peers:
    """Every process that the gateway calls."""

    def __init__(
        self,
        settings: PeerSettings,
        router: Router,
        credentials: Credentials,
        telemetry_: telemetry.Telemetry,
        log: Log,
        registry: Registry | None = None,
    ) -> None:
        self.tokenizer = Tokenizer(settings.tokenizer_address, credentials, telemetry_)
        self.relays = Relays(settings.stream_address, credentials, telemetry_)
        self._registry = registry
        self.engines = Engines(router, credentials, log, registry)
        self._log = log

    async def wait_until_serving(self) -> None:
        """Returns once tokenizer, stream and one engine serve."""
        async with asyncio.TaskGroup() as group:
            for name, peer in (("tokenizer", self.tokenizer), ("stream", self.relays)):
                group.create_task(wait_until_serving(peer.channel, name, peer.address, self._log))
            group.create_task(wait_for(self.engines.first_serving, "engine", self.engines.channels, self._log))

    async def close(self) -> None:
        """Closes every channel."""
        channels = [self.tokenizer.channel, self.relays.channel, *self.engines.channels.values()]
        await asyncio.gather(*(channel.close() for channel in channels))
        if self._registry is not None:
            await self._registry.close()


@contextlib.contextmanager
def _client_span(telemetry_: telemetry.Telemetry, name: str, parent: Span):  # type: ignore[no-untyped-def]
    span = telemetry_.start(name, kind=SpanKind.CLIENT, parent=parent, attributes={names.RPC_SYSTEM: "grpc"})
    error = ""
    try:
        yield span
    except HeadraceError as raised:
        error = raised.reason
        raise
    except (asyncio.CancelledError, GeneratorExit):
        error = "CANCELLED"
        raise
    finally:
        telemetry_.end(span, error=error)


@contextlib.contextmanager
def _errors_of(peer: str, address: str):  # type: ignore[no-untyped-def]
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise peer_error(error, peer, address) from error


def _headers(span: Span) -> tuple[tuple[str, str], ...]:
    return tuple(telemetry.inject(span).items())
