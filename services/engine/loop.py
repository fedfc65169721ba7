"""Runs an engine on a thread of its own and talks to it from others.

Knows threads; nothing of gRPC or asyncio. Commands go in by a locked inbox and are applied between steps; what
each step produced goes out by callbacks on the engine's thread, which must not block. The thread sleeps while
nothing can be computed and wakes for a command or the next deadline. It ends in one of three ways:

    stop(drain=True)     after the last request ended by itself
    stop(drain=False)    after every request was ended as CANCELLED and published
    an exception         ``fatal`` is called with it, once; nothing is published afterwards
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from services.common import scheduling
from services.engine.engine import Engine
from services.engine.outputs import StepOutput
from services.engine.request import Request, RequestRefused

T = TypeVar("T")
_Command = Callable[[], None]


class EngineLoop:
    """The engine's thread and its inbox. Every public method may be called from any thread."""

    def __init__(
        self,
        engine: Engine,
        *,
        publish: Callable[[StepOutput], None],
        refused: Callable[[int, RequestRefused], None],
        fatal: Callable[[BaseException], None],
    ) -> None:
        """Make a loop; ``start`` starts it.

        Args:
            engine: from now on touched by the loop's thread alone.
            publish: called on the engine's thread after each step that had something to tell.
            refused: called on the engine's thread with the id and why, instead of any output.
            fatal: called on the engine's thread when it dies; the process should end.
        """
        self._engine = engine
        self._publish = publish
        self._refused = refused
        self._fatal = fatal
        self._wake = threading.Condition()
        self._inbox: list[_Command] = []
        self._calls: set[Future[object]] = set()
        self._stopping = False
        self._draining = False
        self._ended = False
        self._paused = False
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def add(self, request: Request) -> None:
        """Submit a request; after ``stop`` it is refused with SHUTTING_DOWN."""
        if not self._put(lambda: self._add(request)):
            self._refuse_late(request)

    def grant(self, request_id: int, token_count: int) -> None:
        """Grant credits."""
        self._put(lambda: self._engine.grant(request_id, token_count))

    def abort(self, request_id: int) -> None:
        """Abort a request; late or repeated, it does nothing."""
        self._put(lambda: _ignore(self._engine.abort(request_id)))

    def pause(self) -> None:
        """Take no step until ``resume``; commands are applied, and ``stop`` still ends the loop."""
        with self._wake:
            self._paused = True

    def resume(self) -> None:
        """Take steps again."""
        with self._wake:
            self._paused = False
            self._wake.notify()

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Run a function on the engine's thread between steps; its result, or its exception, is the future's."""
        future: Future[T] = Future()

        def command() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self._engine))
                except Exception as error:  # noqa: BLE001 - the caller's error, not the loop's
                    future.set_exception(error)

        self._calls.add(future)  # type: ignore[arg-type]
        future.add_done_callback(self._calls.discard)
        if not self._put(command):
            future.set_exception(RuntimeError("the engine loop has ended"))
        return future

    def stop(self, *, drain: bool) -> None:
        """Refuse new requests and end: when all have ended (drain), or at once, ending them as CANCELLED.

        Returns immediately (see ``join``). A second call with ``drain=False`` cuts a drain short.
        """
        with self._wake:
            self._stopping = True
            self._draining = drain
            self._wake.notify()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread's end; False when it still runs after ``timeout_s``."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- on the engine's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        scheduling.take_precedence()
        try:
            while self._turn():
                pass
        except BaseException as error:  # noqa: BLE001 - whatever it was, the process must hear of it
            self._close(error)
            self._fatal(error)
        else:
            self._close(RuntimeError("the engine loop has ended"))

    def _turn(self) -> bool:
        """Sleep until there is something to do, apply commands, take one step; False at the end."""
        for command in self._take_commands():
            command()
        if self._stopping and not self._draining:
            self._engine.abort_all()
        if self._engine.has_work and not self._held:
            output = self._engine.step()
            if output.outputs or output.facts is not None:
                self._publish(output)
        return not (self._stopping and not self._engine.has_work and not self._inbox)

    def _take_commands(self) -> list[_Command]:
        with self._wake:
            if self._held:
                self._engine.rest()
                self._wake.wait_for(lambda: not self._held or bool(self._inbox))
            elif not self._engine.runnable:
                self._engine.rest()
                self._wake.wait_for(self._has_reason, timeout=self._time_to_deadline())
            commands, self._inbox = self._inbox, []
            return commands

    @property
    def _held(self) -> bool:
        return self._paused and not self._stopping

    def _has_reason(self) -> bool:
        if self._inbox:
            return True
        return self._stopping and (not self._draining or not self._engine.has_work)

    def _time_to_deadline(self) -> float | None:
        deadline_ns = self._engine.next_deadline_ns
        return None if deadline_ns is None else max(0.0, (deadline_ns - time.monotonic_ns()) / 1e9)

    def _add(self, request: Request) -> None:
        if self._stopping:
            self._refuse_late(request)
            return
        try:
            self._engine.add(request)
        except RequestRefused as refusal:
            self._refused(request.request_id, refusal)

    def _refuse_late(self, request: Request) -> None:
        refusal = RequestRefused("", "SHUTTING_DOWN", "the engine is shutting down")
        self._refused(request.request_id, refusal)

    def _put(self, command: _Command) -> bool:
        with self._wake:
            if self._ended:
                return False
            self._inbox.append(command)
            self._wake.notify()
            return True

    def _close(self, error: BaseException) -> None:
        """Take no more commands; fail the calls that nobody will answer."""
        with self._wake:
            self._ended = True
            self._inbox = []
        for future in list(self._calls):
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(error)


def _ignore(_: object) -> None:
    """Drop a result."""
