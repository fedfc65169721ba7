"""The messages of a session for an asyncio stream: one connection after the other, driven by `session.Session`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from headrace import errors
from headrace.aio_writes import protect
from headrace.answers import StreamMessage, by_transport, error_of
from headrace.async_stream import Source, ended_elsewhere
from headrace.session import GOODBYE_S, Session, cancel_command
from headrace.v1 import gateway_pb2

Command = gateway_pb2.GenerateSessionRequest
Connect = Callable[[AsyncIterator[Command], float | None], grpc.aio.StreamStreamCall[Any, Any]]

_goodbyes: set[asyncio.Task[None]] = set()  # of dropped streams; the event loop itself holds tasks weakly


class SessionSource(Source):
    """One reader; `close` may come from any task of its event loop.

    Ending: an early end sends cancel and waits, for a short time, until the server confirms it; where there is no
    connection (a cancelled task's read takes its call along), cancel goes over a new one.

    Args:
        session: what is remembered between connections.
        connect: starts a call with the commands to send and its timeout.
    """

    def __init__(self, session: Session, connect: Connect) -> None:
        self._session, self._start = session, connect
        self._closing = asyncio.Event()
        self._reading = False
        self._over = False  # ended by the server, or given up
        self._call, self._commands = self._connect()

    @property
    def stream_id(self) -> str:  # type: ignore[override]
        """Names the stream in resume."""
        return self._session.stream_id

    @property
    def last_sequence_number(self) -> int:  # type: ignore[override]
        """Of the last message that came."""
        return self._session.last_sequence_number

    @property
    def resume_count(self) -> int:  # type: ignore[override]
        """How often the stream went on over a new connection."""
        return self._session.resume_count

    async def read(self) -> StreamMessage | None:
        """The next message that the caller has not had, None at the end. Raises HeadraceError."""
        self._reading = True
        try:
            while True:
                try:
                    message = await self._receive()
                except grpc.aio.AioRpcError as failure:
                    if not await self._go_on_after(failure):
                        return None
                    continue
                if message is None:
                    self._end()
                    return None
                mine = None if self._closing.is_set() else self._session.receive(message)
                if mine is not None:
                    return mine
        finally:
            self._reading = False

    async def close(self) -> None:
        """Ends the generation; does nothing if it has ended."""
        if self._over or self._closing.is_set():
            return
        self._closing.set()
        try:
            async with asyncio.timeout(GOODBYE_S):
                await self._say_goodbye()
        except (TimeoutError, grpc.aio.AioRpcError, errors.HeadraceError):
            pass  # the server ends it when it notices
        finally:
            self._end()

    def drop(self) -> None:
        """As `close`, without waiting."""
        task = asyncio.ensure_future(self.close())
        _goodbyes.add(task)
        task.add_done_callback(_goodbyes.discard)

    def _connect(self) -> tuple[grpc.aio.StreamStreamCall[Any, Any], asyncio.Queue[Command | None]]:
        commands: asyncio.Queue[Command | None] = asyncio.Queue()  # None: nothing follows
        commands.put_nowait(self._session.first_command())
        try:
            return protect(self._start(_until_none(commands), self._session.timeout_s())), commands
        except grpc.aio.UsageError:
            self._over = True
            raise errors.Cancelled("the client was closed") from None

    async def _receive(self) -> gateway_pb2.GenerateSessionResponse | None:
        command = self._session.grant()
        if command is not None:
            self._commands.put_nowait(command)
        try:
            message: Any = await self._call.read()
        except asyncio.CancelledError:
            if ended_elsewhere():
                raise errors.Cancelled("the stream was closed") from None
            raise
        return None if message is grpc.aio.EOF else message

    async def _go_on_after(self, failure: grpc.aio.AioRpcError) -> bool:
        """Connects anew; False where nothing more is to come. Raises what ends the stream."""
        self._commands.put_nowait(None)
        if self._session.finished:
            self._end()
            return False
        if self._closing.is_set():
            raise errors.Cancelled("the stream was closed")
        try:
            wait_s = self._session.lost(error_of(failure), by_transport=by_transport(failure))
        except errors.HeadraceError:
            self._end()
            raise
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), wait_s)
            raise errors.Cancelled("the stream was closed")
        self._call, self._commands = self._connect()
        return True

    async def _say_goodbye(self) -> None:
        if self._call.done():
            if not self._session.stream_id:
                return
            self._call, self._commands = self._connect()
        self._commands.put_nowait(cancel_command())
        if self._reading:  # whoever reads there reads to the end
            await self._call.code()
        else:
            while await self._call.read() is not grpc.aio.EOF:
                pass

    def _end(self) -> None:
        self._over = True
        self._commands.put_nowait(None)
        self._call.cancel()


async def _until_none(commands: asyncio.Queue[Command | None]) -> AsyncIterator[Command]:
    while (command := await commands.get()) is not None:
        yield command
