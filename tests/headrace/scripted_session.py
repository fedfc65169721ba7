"""GenerateSession of the scripted gateway: numbered messages, credits counted, faults where a test wants them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from grpc_status import rpc_status

from headrace import errors
from headrace.v1 import gateway_pb2, generation_pb2

BEFORE_OPENED = -1
NEVER = 1 << 30


@dataclass
class SessionCall:
    """One connection as the server saw it."""

    first: gateway_pb2.GenerateSessionRequest
    granted: int = 0  # tokens, all grants together
    sent: int = 0  # tokens
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False


class ScriptedSessions:
    """One stream, sent over as many connections as are made; message i is text i, the one after the last is final.

    Attributes:
        drop_at: for each connection in turn, the message before which it is aborted UNAVAILABLE.
        hold_at: for each connection in turn, the message before which it waits for ever; `held` is set then.
        resend: how many messages before the wanted one a resumed connection repeats.
        skip: a message that is never sent.
        refuse_resume: what resume ends with.
        error, fail_after: what the stream ends with, and after how many deltas.
        tokens_a_message: of each delta.
        session_calls: every connection.
        goodbyes: one entry for each SessionCancel.
        starved: set while a connection waits for credits.
        most_ahead: the most tokens that were ever granted beyond those sent.
    """

    texts: list[str]
    endless: bool
    error: errors.HeadraceError | None
    fail_after: int

    def __init__(self) -> None:
        self.drop_at: list[int] = []
        self.hold_at: list[int] = []
        self.held = asyncio.Event()
        self.resend = 0
        self.skip = NEVER
        self.refuse_resume: errors.HeadraceError | None = None
        self.tokens_a_message = 1
        self.session_calls: list[SessionCall] = []
        self.goodbyes: asyncio.Queue[str] = asyncio.Queue()
        self.starved = asyncio.Event()
        self.most_ahead = 0

    async def GenerateSession(self, requests: AsyncIterator[Any], context: Any) -> None:
        first = await anext(aiter(requests))
        call = SessionCall(first)
        drop, hold = self._faults()
        self.session_calls.append(call)
        resumed = first.HasField("resume")
        if resumed and self.refuse_resume:
            await abort(context, self.refuse_resume)
        begin = max(0, first.resume.last_sequence_number + 1 - self.resend) if resumed else 0
        self._grant(call, first.resume.credit_count if resumed else first.open.credit_count)
        repeated = first.resume.last_sequence_number + 1 if resumed else 0
        commands = asyncio.create_task(self._obey(requests, call))
        try:
            if drop == BEFORE_OPENED:
                await abort(context, errors.Unavailable("lost"))
            opened = gateway_pb2.SessionOpened(stream_id=self._stream_id(), trace_id="0" * 32)
            await context.write(gateway_pb2.GenerateSessionResponse(sequence_number=-1, opened=opened))
            for number in itertools.count(begin):
                if number == drop:
                    await abort(context, errors.Unavailable("lost"))
                if number == hold:
                    self.held.set()
                    await asyncio.Event().wait()
                if not await self._say(call, context, number, free=number < repeated):
                    return
        finally:
            commands.cancel()

    async def _say(self, call: SessionCall, context: Any, number: int, *, free: bool) -> bool:
        """Sends one message; False after the last."""
        if self.error and number == self.fail_after:
            await abort(context, self.error)
        if number > len(self.texts) and not self.endless:
            return False
        if number == self.skip:
            return True
        final = number == len(self.texts) and not self.endless
        if not final and not free:
            await self._wait_for_credits(call)
        if call.cancelled:
            await abort(context, errors.Cancelled("cancelled"))
        if not final and not free:
            call.sent += self.tokens_a_message
        await context.write(self._message(number, final=final))
        return True

    async def _wait_for_credits(self, call: SessionCall) -> None:
        while call.granted - call.sent < self.tokens_a_message and not call.cancelled:
            self.starved.set()
            call.changed.clear()
            await call.changed.wait()
        self.starved.clear()
        await asyncio.sleep(0)  # an endless stream lets others run

    async def _obey(self, requests: AsyncIterator[Any], call: SessionCall) -> None:
        async for request in requests:
            if request.HasField("credits"):
                self._grant(call, request.credits.credit_count)
            elif request.HasField("cancel"):
                call.cancelled = True
                self.goodbyes.put_nowait("cancelled")
            call.changed.set()

    def _grant(self, call: SessionCall, credit_count: int) -> None:
        call.granted += credit_count
        self.most_ahead = max(self.most_ahead, call.granted - call.sent)

    def _faults(self) -> tuple[int, int]:
        drop = self.drop_at.pop(0) if self.drop_at else NEVER
        hold = self.hold_at.pop(0) if self.hold_at else NEVER
        return drop, hold

    def _stream_id(self) -> str:
        opening = next((call.first for call in self.session_calls if call.first.HasField("open")), None)
        return "stream-1" if opening is None or opening.open.generation.resumable else ""

    def _message(self, number: int, *, final: bool) -> gateway_pb2.GenerateSessionResponse:
        if final:
            ending = generation_pb2.Ending(finish_reason=generation_pb2.FINISH_REASON_STOP)
            return gateway_pb2.GenerateSessionResponse(
                sequence_number=number, final=gateway_pb2.Final(endings=[ending], trace_id="0" * 32, model="tiny")
            )
        delta = gateway_pb2.Delta(text=self.texts[min(number, len(self.texts) - 1)], token_count=self.tokens_a_message)
        return gateway_pb2.GenerateSessionResponse(sequence_number=number, delta=delta)


async def abort(context: Any, error: errors.HeadraceError) -> None:
    """Ends a call as our servers do."""
    status = rpc_status.to_status(errors.to_status(error))
    trailing = (("headrace-request-id", "server-id"), *status.trailing_metadata)
    await context.abort(status.code, status.details, trailing)
