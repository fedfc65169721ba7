"""One connection to Redis that carries the commands of many callers: no pool, no lock. Knows no service.

Commands that come in one turn of the event loop leave in one write. Answers come in the order of the commands, so each
belongs to the oldest that has none. A command is sent whole, whether or not somebody still waits for its answer. Where
an answer is late or the connection breaks, the connection is dropped and what was under way fails: nobody knows what
became of it, so commands must bear being sent twice.

redis-py connects, encrypts and logs in; then the transport is ours, and hiredis packs and parses. Its streams cost
twice what both scripts of a request do here.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import hiredis
import redis.asyncio as redis
from redis.asyncio.connection import parse_url
from redis.exceptions import RedisError, ResponseError

from services.common.shared import SharedStateLost

Word = str | bytes | int | float


class Script:
    """A Lua script; Redis knows it by its hash once it has run."""

    def __init__(self, text: str) -> None:
        self.text, self.digest = text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


@dataclass(slots=True)
class _Command:
    data: bytes
    answer: asyncio.Future[Any]
    in_full: Sequence[Word] = ()  # with a script's text, should Redis not know its hash
    due: float = 0.0  # by when it is answered, time of the event loop

    def fail(self, error: BaseException) -> None:
        """Nothing is known of what became of it."""
        if not self.answer.done():
            self.answer.set_exception(SharedStateLost(type(error).__name__))


class SharedConnection:
    """Connects at the first command, and again at the first one after a loss.

    Args:
        url: redis://[[user]:password@]host[:port][/database], or rediss:// for TLS.
        timeout_s: seconds for each of: connecting, an answer.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        options: dict[str, Any] = {**parse_url(url), "protocol": 2, "socket_timeout": timeout_s}
        self._pool = redis.ConnectionPool(**options)
        self._timeout_s = timeout_s
        self._unsent: list[_Command] = []
        self._wire: _Wire | None = None
        self._life: asyncio.Task[None] | None = None

    def ask(self, *words: Word) -> asyncio.Future[Any]:
        """Sends a command; the future is its answer, or raises SharedStateLost. To cancel it is to hear no answer."""
        return self._add(_packed(words))

    def run(self, script: Script, keys: Sequence[str], arguments: Sequence[Word] = ()) -> asyncio.Future[Any]:
        """Runs a script, once, whether or not Redis knows it still; else as `ask`."""
        words = (len(keys), *keys, *arguments)
        return self._add(_packed(("EVALSHA", script.digest, *words)), ("EVAL", script.text, *words))

    async def close(self) -> None:
        """Drops the connection; what has no answer fails."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)

    def _add(self, data: bytes, in_full: Sequence[Word] = ()) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        command = _Command(data, loop.create_future(), in_full)
        self._unsent.append(command)
        if self._wire is not None:
            if len(self._unsent) == 1:
                loop.call_soon(self._flush)
        elif self._life is None or self._life.done():
            self._life = loop.create_task(self._live())
        return command.answer

    def _flush(self) -> None:
        if self._wire is not None and not self._wire.lost.done() and self._unsent:
            batch, self._unsent = self._unsent, []
            self._wire.write(batch)

    async def _live(self) -> None:
        """Connections, one after the other, until one is lost while there is nothing to send."""
        error: BaseException = asyncio.CancelledError()
        try:
            while self._unsent:
                await self._connected()
        except (RedisError, OSError) as raised:
            error = raised
        finally:
            batch, self._unsent = self._unsent, []
            for command in batch:
                command.fail(error)

    async def _connected(self) -> None:
        """One connection, until it is lost. Raises what kept it from being made."""
        connection: redis.Connection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            async with asyncio.timeout(self._timeout_s):
                await connection.connect()  # type: ignore[no-untyped-call]
            writer = cast("asyncio.StreamWriter", connection._writer)  # noqa: SLF001 - the library has no call for this
            self._wire = wire = _Wire(cast("asyncio.Transport", writer.transport), self._timeout_s)
            self._flush()
            try:
                await wire.lost
            finally:
                self._wire = None
                wire.drop(asyncio.CancelledError())
        finally:
            await connection.disconnect(nowait=True)


class _Wire(asyncio.Protocol):
    """One connection, from its first command to its loss. `lost` is done then."""

    def __init__(self, transport: asyncio.Transport, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self._transport, self._timeout_s = transport, timeout_s
        self._sent: deque[_Command] = deque()
        self._reader = hiredis.Reader(protocolError=ConnectionError, replyError=ResponseError)
        self._timer: asyncio.TimerHandle | None = None
        transport.set_protocol(self)

    def write(self, commands: Sequence[_Command]) -> None:
        """Sends commands."""
        due = self._loop.time() + self._timeout_s
        for command in commands:
            command.due = due
        self._sent += commands
        self._transport.write(b"".join([command.data for command in commands]))
        if self._timer is None:
            self._timer = self._loop.call_at(due, self._look)

    def data_received(self, data: bytes) -> None:
        """Gives each answer to the oldest command without one."""
        self._reader.feed(data)
        try:
            while (answer := self._reader.gets()) is not False:
                self._answered(answer)
        except ConnectionError as error:
            self.drop(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The other side has closed it, or this one."""
        self.drop(exc or ConnectionResetError())

    def drop(self, error: BaseException) -> None:
        """Ends it; what has no answer fails."""
        while self._sent:
            self._sent.popleft().fail(error)
        if self._timer is not None:
            self._timer.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def _answered(self, answer: Any) -> None:
        if not self._sent:
            raise ConnectionError("an answer to nothing")
        command = self._sent.popleft()
        if not isinstance(answer, ResponseError):
            if not command.answer.done():
                command.answer.set_result(answer)
        elif command.in_full and str(answer).startswith("NOSCRIPT"):
            command.data, command.in_full = _packed(command.in_full), ()
            self.write([command])
        else:
            command.fail(answer)

    def _look(self) -> None:
        """Drops the connection if the oldest answer is late."""
        self._timer = None
        if self._sent and self._sent[0].due <= self._loop.time():
            self.drop(TimeoutError())
        elif self._sent:
            self._timer = self._loop.call_at(self._sent[0].due, self._look)


def _packed(words: Sequence[Word]) -> bytes:
    command: bytes = hiredis.pack_command(cast("tuple[Word]", tuple(words)))
    return command
