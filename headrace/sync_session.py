"""The messages of a session for a blocking stream: one connection after the other, driven by `session.Session`."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from headrace import errors
from headrace.answers import StreamMessage, by_transport, error_of
from headrace.session import GOODBYE_S, Session, cancel_command
from headrace.sync_stream import Source
from headrace.v1 import gateway_pb2

Command = gateway_pb2.GenerateSessionRequest
Connect = Callable[[Iterator[Command], float | None], Any]


class _Connection:
    """One call, the commands to it, and whether it has ended."""

    def __init__(self, first: Command, timeout_s: float | None, connect: Connect) -> None:
        self.commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None: nothing follows
        self.ended = threading.Event()
        self.commands.put(first)
        try:
            self.call = connect(iter(self.commands.get, None), timeout_s)
        except ValueError:  # what grpc says of a closed channel
            raise errors.Cancelled("the client was closed") from None
        if not self.call.add_callback(self._on_end):
            self._on_end()

    def _on_end(self) -> None:
        self.ended.set()
        self.commands.put(None)  # lets grpc's own thread go, which waits for commands


class SessionSource(Source):
    """One thread reads; `close` may come from any.

    Ending: an early end sends cancel and waits, for a short time, until the server confirms it; where there is no
    connection, cancel goes over a new one.

    Args:
        session: what is remembered between connections.
        connect: starts a call with the commands to send and its timeout.
    """

    def __init__(self, session: Session, connect: Connect) -> None:
        self._session, self._start = session, connect
        self._lock = threading.Lock()  # over `_closing`, `_over` and replacing `_connection`
        self._closing = threading.Event()
        self._reading = False
        self._over = False  # ended by the server, or given up
        self._connection = self._connect()

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

    def read(self) -> StreamMessage | None:
        """The next message that the caller has not had, None at the end. Raises HeadraceError."""
        self._reading = True
        try:
            while True:
                try:
                    message = self._receive()
                except grpc.RpcError as failure:
                    if not self._go_on_after(failure):
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

    def close(self) -> None:
        """Ends the generation; does nothing if it has ended."""
        with self._lock:
            if self._over or self._closing.is_set():
                return
            self._closing.set()
        try:
            self._say_goodbye()
        except (grpc.RpcError, errors.HeadraceError):
            pass  # the server ends it when it notices
        finally:
            self._end()

    def drop(self) -> None:
        """As `close`, without waiting: whoever collects garbage must not block."""
        with contextlib.suppress(RuntimeError):  # no threads any more: the process ends, and the connection with it
            threading.Thread(target=self.close, name="headrace-goodbye", daemon=True).start()

    def _connect(self) -> _Connection:
        return _Connection(self._session.first_command(), self._session.timeout_s(), self._start)

    def _receive(self) -> gateway_pb2.GenerateSessionResponse | None:
        command = self._session.grant()
        if command is not None:
            self._connection.commands.put(command)
        message: gateway_pb2.GenerateSessionResponse | None = next(self._connection.call, None)
        return message

    def _go_on_after(self, failure: Any) -> bool:
        """Connects anew; False where nothing more is to come. Raises what ends the stream."""
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
        self._closing.wait(wait_s)
        with self._lock:
            if self._closing.is_set():
                raise errors.Cancelled("the stream was closed")
            self._connection = self._connect()
        return True

    def _say_goodbye(self) -> None:
        if self._connection.ended.is_set():
            if not self._session.stream_id:
                return
            self._connection = self._connect()
        connection = self._connection
        connection.commands.put(cancel_command())
        if self._reading:  # whoever reads there reads to the end
            connection.ended.wait(GOODBYE_S)
            return
        watchdog = threading.Timer(GOODBYE_S, connection.call.cancel)
        watchdog.daemon = True
        watchdog.start()
        try:
            for _ in connection.call:
                pass
        finally:
            watchdog.cancel()

    def _end(self) -> None:
        with self._lock:
            self._over = True
        self._connection.call.cancel()
