"""The protobuf edge of the stream process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc.aio
from google.rpc import code_pb2

from headrace import errors
from headrace.v1 import engine_pb2, generation_pb2, stream_pb2, stream_pb2_grpc
from services.common import names, telemetry
from services.common.calls import Call
from services.common.logs import Log
from services.common.serve import StartError
from services.stream.detokenizer import DetokenizerFactory
from services.stream.peers import Engines, Generation
from services.stream.relay import Piece, Relay
from services.stream.settings import StreamSettings
from services.stream.stops import StopMatcher

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


class Delivery:
    """One `Deliver` call: news from the engine go in, a wake-up for the writer comes out."""

    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.wake = asyncio.Event()
        self.generation: Generation | None = None
        self.opened_ns = time.monotonic_ns()
        self.first_output_ns = 0
        self.first_token_timings: engine_pb2.EngineTimings | None = None
        self.ending: engine_pb2.GenerationEnding | None = None
        self.lost: errors.HeadraceError | None = None

    def on_output(self, output: engine_pb2.GenerationOutput) -> None:
        """New tokens or the ending: into the relay."""
        if output.HasField("first_token_timings"):
            self.first_output_ns = time.monotonic_ns()
            self.first_token_timings = output.first_token_timings
        ending = output.ending if output.HasField("ending") else None
        by_token = ending is not None and ending.HasField("matched_token_id")
        if self.relay.push(output.token_ids, ending_token=by_token) and ending is None and self.generation:
            self.generation.cancel()
        if ending is not None:
            self.ending = ending
            self.relay.end()
        self.wake.set()

    def on_lost(self, error: errors.HeadraceError) -> None:
        """The engine went away."""
        self.lost = error
        self.wake.set()


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
        delivery = Delivery(self._relay(opening.open))
        self._open_count += 1
        self.idle.clear()
        commands: asyncio.Task[None] | None = None
        try:
            delivery.generation = self._open(opening.open, delivery, call)
            commands = asyncio.create_task(_obey(requests, delivery))
            await self._deliver(delivery, call, include_ids=opening.open.include_token_ids)
        finally:
            if commands is not None:
                commands.cancel()
            if delivery.generation is not None:
                delivery.generation.abandon()
            self._open_count -= 1
            if not self._open_count:
                self.idle.set()
            self._record(delivery, call)

    def _relay(self, opening: stream_pb2.DeliverOpen) -> Relay:
        if self.detokenizers is None:
            raise errors.Unavailable("the stream process is starting", reason=errors.Reason.STARTING)
        return Relay(
            self.detokenizers.new(),
            StopMatcher(list(opening.stop.strings), include_stop=opening.stop.include_stop),
            min_tokens=opening.generation.min_tokens,
            coalesce_tokens=self._coalescing.coalesce_tokens,
            coalesce_ns=int(self._coalescing.coalesce_ms * 1e6),
            whole=opening.whole,
        )

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

    async def _deliver(self, delivery: Delivery, call: Call, *, include_ids: bool) -> None:
        """Writes whatever is due until the answer has ended and all of it is sent."""
        relay, loop = delivery.relay, asyncio.get_running_loop()
        while True:
            delivery.wake.clear()
            piece = relay.take()
            if piece is not None:
                began = time.monotonic_ns()
                await call.write(
                    stream_pb2.DeliverResponse(delta=_delta(piece, delivery, call, include_ids=include_ids))
                )
                relay.statistics.send_blocked_ns += time.monotonic_ns() - began
            elif relay.ended:
                break
            elif delivery.lost is not None:
                raise delivery.lost
            else:
                due_ns = relay.due_in_ns()
                timer = loop.call_later(due_ns / 1e9, delivery.wake.set) if due_ns is not None else None
                await delivery.wake.wait()
                if timer is not None:
                    timer.cancel()
        await call.write(stream_pb2.DeliverResponse(final=_final(delivery, call)))

    def _record(self, delivery: Delivery, call: Call) -> None:
        statistics = delivery.relay.statistics
        if not statistics.first_token_ns or not call.span.is_recording():
            return
        now = time.monotonic_ns()
        self._telemetry.phase(
            names.SPAN_STREAM_DETOKENIZE,
            call.span,
            statistics.first_token_ns,
            statistics.last_token_ns,
            {
                names.REQUEST_ID: call.metadata.get(names.REQUEST_ID, ""),
                names.BUSY_MS: statistics.detokenize_ns / 1e6,
                names.TOKENS: statistics.token_count,
            },
        )
        if statistics.first_sent_ns:
            attributes = {
                names.MESSAGES: statistics.message_count,
                names.SEND_BLOCKED_MS: statistics.send_blocked_ns / 1e6,
                names.TAIL_MS: (now - statistics.last_token_ns) / 1e6,
            }
            self._telemetry.phase(names.SPAN_STREAM_SEND, call.span, statistics.first_sent_ns, now, attributes)


async def _obey(requests: AsyncIterator[stream_pb2.DeliverRequest], delivery: Delivery) -> None:
    """Passes the gateway's commands on while the delivery lasts."""
    async for request in requests:
        if delivery.generation is None:
            return
        if request.HasField("credits"):
            delivery.generation.grant(request.credits.credit_count)
        elif request.HasField("cancel"):
            delivery.generation.abandon()
            delivery.on_lost(errors.Cancelled("cancelled by the gateway"))
            return


def _delta(piece: Piece, delivery: Delivery, call: Call, *, include_ids: bool) -> stream_pb2.DeliverDelta:
    delta = stream_pb2.DeliverDelta(
        text=piece.text, token_count=len(piece.token_ids), token_ids=piece.token_ids if include_ids else ()
    )
    engine = delivery.first_token_timings
    if engine is not None:
        delivery.first_token_timings = None
        reached_ns = delivery.first_output_ns if delivery.relay.whole else time.monotonic_ns()
        delta.first_token_timings.total_ns = reached_ns - call.arrival_ns
        delta.first_token_timings.engine_hop_ns = delivery.first_output_ns - delivery.opened_ns
        delta.first_token_timings.engine_ns = engine.total_ns
        delta.first_token_timings.queue_ns = engine.queue_ns
        delta.first_token_timings.prefill_ns = engine.prefill_ns
    return delta


def _final(delivery: Delivery, call: Call) -> stream_pb2.DeliverFinal:
    """The final message. Raises the error that an answer without one ended with."""
    ending, relay = delivery.ending, delivery.relay
    if ending is None:
        raise errors.Internal("the answer ended without an ending")
    reason = ending.finish_reason
    if relay.matched_stop is not None:
        reason = generation_pb2.FINISH_REASON_STOP
    elif reason == generation_pb2.FINISH_REASON_DEADLINE_EXCEEDED:
        raise errors.DeadlineExceeded("the deadline has passed")
    elif reason == generation_pb2.FINISH_REASON_CANCELLED:
        raise errors.Cancelled("the generation was cancelled")
    elif reason == generation_pb2.FINISH_REASON_ERROR:
        kind = errors.BY_CODE.get(ending.error_code or code_pb2.INTERNAL, errors.Internal)
        raise kind(ending.error_message, reason=ending.error_reason, field=ending.error_field)
    statistics, now = relay.statistics, time.monotonic_ns()
    final = stream_pb2.DeliverFinal(usage=ending.usage, engine_timings=ending.timings)
    final.usage.completion_token_count = statistics.token_count
    final.endings.add(
        finish_reason=reason,
        matched_stop=relay.matched_stop,
        matched_token_id=ending.matched_token_id
        if ending.HasField("matched_token_id") and relay.matched_stop is None
        else None,
        completion_token_count=statistics.token_count,
    )
    final.relay_timings.total_ns = now - call.arrival_ns
    final.relay_timings.detokenize_ns = statistics.detokenize_ns
    final.relay_timings.send_blocked_ns = statistics.send_blocked_ns
    final.relay_timings.tail_ns = now - statistics.last_token_ns
    final.relay_timings.message_count = statistics.message_count
    return final
