"""The protobuf edge of the stream process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import grpc.aio

from headrace import errors
from headrace.v1 import engine_pb2, stream_pb2, stream_pb2_grpc
from services.common import metric_names, names, telemetry
from services.common.calls import Call
from services.common.logs import Log
from services.common.redis_watch import RedisWatch
from services.common.serve import Service, StartError
from services.stream.delivery import Delivery
from services.stream.detokenizer import DetokenizerFactory
from services.stream.peers import Engines
from services.stream.redis_log import RedisLog
from services.stream.relay import Relay
from services.stream.replay import MemoryLog
from services.stream.session import Session
from services.stream.sessions import Sessions
from services.stream.settings import StreamSettings
from services.stream.stops import StopAutomaton, StopMatcher

FULL_NAME = "headrace.v1.StreamService"
DEADLINE_MARGIN_S = 0.002


class StreamProcess(Service):
    """The stream process as `serve` sees it."""

    name = "stream"

    def __init__(self, settings: StreamSettings, telemetry_: telemetry.Telemetry, log: Log) -> None:
        self._settings = settings
        self._engines = Engines(log, settings.peer_tls.credentials())
        self._redis_watch = RedisWatch(settings.peer_tls.redis_url(settings.redis.url), log)
        self._servicer = StreamServicer(settings, telemetry_, self._engines, log)
        self._sweeper: asyncio.Task[None] | None = None

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Adds the servicer."""
        stream_pb2_grpc.add_StreamServiceServicer_to_server(self._servicer, server)
        return [FULL_NAME]

    async def start(self) -> None:
        """Loads the tokenizer."""
        await self._redis_watch.begin()
        directory = self._settings.model.directory()
        try:
            self._servicer.detokenizers = await asyncio.to_thread(DetokenizerFactory.load, directory)
        except ValueError as error:
            raise StartError(str(error)) from error
        self._sweeper = asyncio.create_task(self._servicer.sessions.sweep())

    async def stop(self) -> None:
        """Drops every session, and detaches from every engine."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        await self._redis_watch.close()
        await self._servicer.sessions.close()
        await self._engines.close()


class StreamServicer(stream_pb2_grpc.StreamServiceServicer):
    """Deliver."""

    def __init__(self, settings: StreamSettings, telemetry_: telemetry.Telemetry, engines: Engines, log: Log) -> None:
        self._coalescing = settings.coalescing
        self._telemetry = telemetry_
        self._engines = engines
        self.detokenizers: DetokenizerFactory | None = None
        keep_s, url = settings.resume.replay_s, settings.peer_tls.redis_url(settings.redis.url)
        self.sessions = Sessions(
            self._resumable_delivery,
            engines,
            RedisLog(url, keep_s) if url else MemoryLog(keep_s),
            detached_s=settings.resume.detached_s,
            engine_retry_s=settings.resume.engine_retry_s,
            diagnostics=log,
        )
        self._open_count = 0
        telemetry_.metrics.each_second(self._sample)

    def _sample(self) -> None:
        metrics = self._telemetry.metrics
        metrics.set(metric_names.STREAM_OPEN, self._open_count)
        metrics.total(metric_names.STREAM_ENGINES_LOST, self._engines.lost_count)

    async def Deliver(self, requests: AsyncIterator[stream_pb2.DeliverRequest], call: Call) -> None:  # noqa: N802
        """Relays one generation to the gateway."""
        first = await anext(aiter(requests), None)
        self._open_count += 1
        try:
            if first is not None and first.HasField("resume"):
                await self._resume(first.resume, requests, call)
            elif first is not None and first.HasField("open"):
                self._prepare(first.open.generation, call)
                await (self._open_session if first.open.stream_id else self._open)(first.open, requests, call)
            else:
                raise errors.InvalidArgument("the first command must be open or resume", field="command")
        finally:
            self._open_count -= 1

    async def _open(
        self, opening: stream_pb2.DeliverOpen, requests: AsyncIterator[stream_pb2.DeliverRequest], call: Call
    ) -> None:
        """A delivery that ends with its call."""
        delivery = self._delivery(opening, call.arrival_ns, include_ids=opening.include_token_ids)
        delivery.opened_ns = time.monotonic_ns()
        delivery.generation = self._engines.at(opening.engine_address).open(opening.generation, delivery)
        commands = asyncio.create_task(_obey(requests, delivery))
        try:
            await _deliver(delivery, call)
        finally:
            commands.cancel()
            delivery.generation.abandon()
            self._record(delivery, call)

    async def _open_session(
        self, opening: stream_pb2.DeliverOpen, requests: AsyncIterator[stream_pb2.DeliverRequest], call: Call
    ) -> None:
        """A delivery that outlives its call."""
        session = await self.sessions.open(opening)
        await self._read(session, 0, opening.generation.credit_count, requests, call)

    async def _resume(
        self, asked: stream_pb2.DeliverResume, requests: AsyncIterator[stream_pb2.DeliverRequest], call: Call
    ) -> None:
        """Goes on with a delivery whose call was lost."""
        session = await self.sessions.resume(asked)
        await self._read(session, asked.last_sequence_number + 1, asked.credit_count, requests, call)

    async def _read(
        self,
        session: Session,
        first: int,
        credit_count: int,
        requests: AsyncIterator[stream_pb2.DeliverRequest],
        call: Call,
    ) -> None:
        commands = asyncio.create_task(_obey_session(requests, session))
        try:
            async with contextlib.aclosing(session.read(first, credit_count)) as entries:
                async for entry in entries:
                    call.answered = entry.HasField("final")
                    await _send(_as_asked(entry, session.opening), session.delivery, call)
        finally:
            commands.cancel()
            if session.finished:
                self._record(session.delivery, call)

    def _prepare(self, command: engine_pb2.OpenGeneration, call: Call) -> None:
        """Trace context and deadline travel inside the command."""
        carrier = telemetry.inject(call.span)
        command.traceparent, command.tracestate = carrier.get("traceparent", ""), carrier.get("tracestate", "")
        timeout_s = call.timeout_s(DEADLINE_MARGIN_S)
        if timeout_s is not None:
            command.timeout_ns = int(timeout_s * 1e9)
        call.span.request_id = command.request_id

    def _resumable_delivery(self, opening: stream_pb2.DeliverOpen) -> Delivery:
        delivery = self._delivery(opening, time.monotonic_ns(), include_ids=True)
        delivery.prompt_token_count = len(opening.generation.prompt_token_ids)
        return delivery

    def _delivery(self, opening: stream_pb2.DeliverOpen, arrival_ns: int, *, include_ids: bool) -> Delivery:
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
        resumable = bool(opening.stream_id)
        return Delivery(relays, arrival_ns, detokenizers.token_bytes, include_ids=include_ids, resumable=resumable)

    def _record(self, delivery: Delivery, call: Call) -> None:
        statistics = delivery.statistics()
        metrics = self._telemetry.metrics
        metrics.add(metric_names.STREAM_MESSAGES, statistics.message_count)
        metrics.add(metric_names.STREAM_TOKENS, statistics.token_count)
        metrics.add(metric_names.STREAM_DETOKENIZE, statistics.detokenize_ns / 1e9)
        metrics.add(metric_names.STREAM_BLOCKED, delivery.send_blocked_ns / 1e9)
        if not statistics.first_token_ns or not call.span.is_recording():
            return
        now = time.monotonic_ns()
        self._telemetry.phase(
            names.SPAN_STREAM_DETOKENIZE,
            call.span,
            statistics.first_token_ns,
            statistics.last_token_ns,
            {
                names.BUSY_MS: statistics.detokenize_ns / 1e6,
                names.DETOKENIZE_CALLS: statistics.detokenize_count,
                names.TOKENS: statistics.token_count,
            },
            level=telemetry.DETAILS,
        )
        if statistics.first_sent_ns:
            attributes = {
                names.MESSAGES: statistics.message_count,
                names.SENT_BYTES: delivery.sent_bytes,
                names.SEND_FIRST_MS: delivery.first_handed_ns / 1e6,
                names.SEND_BLOCKED_MS: delivery.send_blocked_ns / 1e6,
                names.TAIL_MS: (now - statistics.last_token_ns) / 1e6,
            }
            self._telemetry.phase(names.SPAN_STREAM_SEND, call.span, statistics.first_sent_ns, now, attributes)


async def _deliver(delivery: Delivery, call: Call) -> None:
    """Writes whatever is due until every answer has ended and all of it is sent."""
    sequence_number = 0
    while True:
        delivery.wake.clear()
        delta = delivery.take()
        if delta is not None:
            await _send(stream_pb2.DeliverResponse(delta=delta, sequence_number=sequence_number), delivery, call)
            sequence_number += 1
        elif delivery.ended:
            break
        elif delivery.lost is not None:
            raise delivery.lost
        else:
            await delivery.wake.wait()
    final = stream_pb2.DeliverResponse(final=delivery.final(), sequence_number=sequence_number)
    call.answered = True
    await _send(final, delivery, call)


async def _send(message: stream_pb2.DeliverResponse, delivery: Delivery, call: Call) -> None:
    """Writes a message, and keeps account of it."""
    began = time.monotonic_ns()
    await call.write(message)
    delivery.send_blocked_ns += time.monotonic_ns() - began
    delivery.sent_bytes += message.ByteSize()


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


async def _obey_session(requests: AsyncIterator[stream_pb2.DeliverRequest], session: Session) -> None:
    """Passes the gateway's commands on while its call lasts."""
    async for request in requests:
        if request.HasField("credits"):
            session.grant(request.credits.credit_count)
        elif request.HasField("cancel"):
            await session.cancel()
            return


def _as_asked(entry: stream_pb2.DeliverResponse, opening: stream_pb2.DeliverOpen) -> stream_pb2.DeliverResponse:
    """An entry of the log as the gateway wants it: token ids only where asked for."""
    if opening.include_token_ids or not entry.HasField("delta"):
        return entry
    shown = stream_pb2.DeliverResponse()
    shown.CopyFrom(entry)
    del shown.delta.token_ids[:]
    return shown
