"""The protobuf edge of the stream process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc.aio

from headrace import errors
from headrace.v1 import stream_pb2, stream_pb2_grpc
from services.common import names, telemetry
from services.common.calls import Call
from services.common.logs import Log
from services.common.serve import StartError
from services.stream.delivery import Delivery
from services.stream.detokenizer import DetokenizerFactory
from services.stream.peers import Engines, Generation
from services.stream.relay import Relay
from services.stream.settings import StreamSettings
from services.stream.stops import StopAutomaton, StopMatcher

FULL_NAME = "headrace.v1.StreamService"
DEADLINE_MARGIN_S = 0.002


class StreamProcess:
    """The stream process as `serve` sees it."""

    name = "stream"

    def __init__(self, settings: StreamSettings, telemetry_: telemetry.Telemetry, log: Log) -> None:
        self._settings = settings
        self._engines = Engines(log)
        self._servicer = StreamServicer(settings, telemetry_, self._engines)

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Adds the servicer."""
        stream_pb2_grpc.add_StreamServiceServicer_to_server(self._servicer, server)
        return [FULL_NAME]

    async def start(self) -> None:
        """Loads the tokenizer."""
        directory = self._settings.model.directory()
        try:
            self._servicer.detokenizers = await asyncio.to_thread(DetokenizerFactory.load, directory)
        except ValueError as error:
            raise StartError(str(error)) from error

    async def failure(self) -> str:
        """Nothing here fails on its own."""
        await asyncio.Event().wait()
        return ""

    async def drain(self) -> None:
        """Returns when no delivery is open."""
        await self._servicer.idle.wait()

    async def stop(self) -> None:
        """Detaches from every engine."""
        await self._engines.close()


class StreamServicer(stream_pb2_grpc.StreamServiceServicer):
    """Deliver."""

    def __init__(self, settings: StreamSettings, telemetry_: telemetry.Telemetry, engines: Engines) -> None:
        self._coalescing = settings.coalescing
        self._telemetry = telemetry_
        self._engines = engines
        self.detokenizers: DetokenizerFactory | None = None
        self._open_count = 0
        self.idle = asyncio.Event()
        self.idle.set()

    async def Deliver(self, requests: AsyncIterator[stream_pb2.DeliverRequest], call: Call) -> None:  # noqa: N802
        """Relays one generation to the gateway."""
        opening = await anext(aiter(requests), None)
        if opening is None or not opening.HasField("open"):
            raise errors.InvalidArgument("the first command must be open", field="command")
        delivery = self._delivery(opening.open, call)
        self._open_count += 1
        self.idle.clear()
        commands: asyncio.Task[None] | None = None
        try:
            delivery.generation = self._open(opening.open, delivery, call)
            commands = asyncio.create_task(_obey(requests, delivery))
            await _deliver(delivery, call)
        finally:
            if commands is not None:
                commands.cancel()
            if delivery.generation is not None:
                delivery.generation.abandon()
            self._open_count -= 1
            if not self._open_count:
                self.idle.set()
            self._record(delivery, call)

    def _delivery(self, opening: stream_pb2.DeliverOpen, call: Call) -> Delivery:
        detokenizers = self.detokenizers
        if detokenizers is None:
            raise errors.Unavailable("the stream process is starting", reason=errors.Reason.STARTING)
        stops = StopAutomaton(list(opening.stop.strings))
        relays = [
            Relay(
                detokenizers.new(),
                StopMatcher(stops, include_stop=opening.stop.include_stop),
                min_tokens=opening.generation.min_tokens,
                coalesce_tokens=self._coalescing.coalesce_tokens,
                coalesce_ns=int(self._coalescing.coalesce_ms * 1e6),
                whole=opening.whole,
            )
            for _ in range(max(1, opening.generation.n))
        ]
        include_ids = opening.include_token_ids
        return Delivery(relays, call.arrival_ns, detokenizers.token_bytes, include_ids=include_ids)

    def _open(self, opening: stream_pb2.DeliverOpen, delivery: Delivery, call: Call) -> Generation:
        command = opening.generation
        carrier = telemetry.inject(call.span)
        command.traceparent, command.tracestate = carrier.get("traceparent", ""), carrier.get("tracestate", "")
        timeout_s = call.timeout_s(DEADLINE_MARGIN_S)
        if timeout_s is not None:
            command.timeout_ns = int(timeout_s * 1e9)
        call.span.set_attribute(names.REQUEST_ID, command.request_id)
        delivery.opened_ns = time.monotonic_ns()
        return self._engines.at(opening.engine_address).open(command, delivery)

    def _record(self, delivery: Delivery, call: Call) -> None:
        statistics = delivery.statistics()
        if not statistics.first_token_ns or not call.span.is_recording():
            return
        now = time.monotonic_ns()
        self._telemetry.phase(
            names.SPAN_STREAM_DETOKENIZE,
            call.span,
            statistics.first_token_ns,
            statistics.last_token_ns,
            {names.BUSY_MS: statistics.detokenize_ns / 1e6, names.TOKENS: statistics.token_count},
        )
        if statistics.first_sent_ns:
            attributes = {
                names.MESSAGES: statistics.message_count,
                names.SEND_BLOCKED_MS: delivery.send_blocked_ns / 1e6,
                names.TAIL_MS: (now - statistics.last_token_ns) / 1e6,
            }
            self._telemetry.phase(names.SPAN_STREAM_SEND, call.span, statistics.first_sent_ns, now, attributes)


async def _deliver(delivery: Delivery, call: Call) -> None:
    """Writes whatever is due until every answer has ended and all of it is sent."""
    loop = asyncio.get_running_loop()
    while True:
        delivery.wake.clear()
        delta = delivery.take()
        if delta is not None:
            began = time.monotonic_ns()
            await call.write(stream_pb2.DeliverResponse(delta=delta))
            delivery.send_blocked_ns += time.monotonic_ns() - began
        elif delivery.ended:
            break
        elif delivery.lost is not None:
            raise delivery.lost
        else:
            due_ns = delivery.due_in_ns()
            timer = loop.call_later(due_ns / 1e9, delivery.wake.set) if due_ns is not None else None
            await delivery.wake.wait()
            if timer is not None:
                timer.cancel()
    await call.write(stream_pb2.DeliverResponse(final=delivery.final()))


async def _obey(requests: AsyncIterator[stream_pb2.DeliverRequest], delivery: Delivery) -> None:
    """Passes the gateway's commands on while the delivery lasts."""
    async for request in requests:
        if delivery.generation is None:
            return
        if request.HasField("credits"):
            delivery.generation.grant(request.credits.credit_count, request.credits.index)
        elif request.HasField("cancel"):
            delivery.generation.abandon()
            delivery.on_lost(errors.Cancelled("cancelled by the gateway"))
            return
