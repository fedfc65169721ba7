"""Runs a few programs together: all start, all are ready, one dies -> all stop. Knows no service by name.

Each program runs in its own process group, so that Ctrl-C reaches the supervisor alone and programs end in order; and
each is killed by the kernel if the supervisor itself is killed. What a program writes is kept (the last lines) and
handed on line by line. One thread a program reads, one waits; events meet in one queue, which `wait` consumes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from headrace.cli.deaths import Death, reason_of

KEPT_LINES = 400
SECOND_SIGNAL_S = 0.5  # after the first SIGTERM, when everything must stop at once
KILL_S = 3.0  # after the first SIGTERM, when everything must stop at once
SLICE_S = 0.2  # how late a signal may be noticed
READ_LAST_LINES_S = 0.5  # for what a dead program had still written

OnLine = Callable[[str, str], None]


@dataclass(frozen=True)
class Program:
    """One program to run."""

    name: str
    command: Sequence[str]
    environ: Mapping[str, str]


class ProgramDied(Exception):
    """A program ended although nobody asked it to; `death` says which, how and why."""

    def __init__(self, death: Death) -> None:
        self.death = death
        super().__init__(str(death))


class StopAsked(Exception):
    """`ask_to_stop` was called, by a signal for example."""


@dataclass
class _Child:
    program: Program
    process: subprocess.Popen[str]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))


class Supervisor:
    """Starts programs and stops them.

    `start` must be called from a thread that outlives the programs: the kernel ends them with it.

    Args:
        programs: what to run, in the order of starting; `stop` goes through them backwards.
        on_line: called with (name, line) for every line a program writes, from a thread of the supervisor.
    """

    def __init__(self, programs: Sequence[Program], on_line: OnLine | None = None) -> None:
        self._programs = programs
        self._on_line = on_line
        self._children: dict[str, _Child] = {}
        self._events: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # a name that ended; None: asked to stop
        self._stop_requests = 0
        self._stopping = False
        self._death: Death | None = None

    @property
    def pids(self) -> dict[str, int]:
        """Process id by program name."""
        return {name: child.process.pid for name, child in self._children.items()}

    def lines(self, name: str) -> list[str]:
        """The last lines that a program wrote."""
        return list(self._children[name].lines)

    def start(self) -> None:
        """Starts every program; returns at once.

        Raises:
            OSError: one cannot be executed; those before it are stopped again.
        """
        launcher = str(Path(__file__).with_name("launcher.py"))
        for program in self._programs:
            command = [sys.executable, "-I", "-S", launcher, str(os.getpid()), *program.command]
            process = subprocess.Popen(
                command,
                env=dict(program.environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                process_group=0,
            )
            child = self._children[program.name] = _Child(program, process)
            reader = threading.Thread(target=self._read, args=(child,), daemon=True)
            reader.start()
            threading.Thread(target=self._await_end, args=(child, reader), daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Blocks until something happens.

        Raises:
            ProgramDied: a program ended; again at every later call.
            StopAsked: `ask_to_stop` was called.
            TimeoutError: nothing happened in `timeout_s` seconds.
        """
        if self._death is not None:
            raise ProgramDied(self._death)
        name = self._next_event(timeout_s)
        if name is None:
            raise StopAsked
        self._death = self._death_of(self._children[name])
        raise ProgramDied(self._death)

    def _next_event(self, timeout_s: float | None) -> str | None:
        """The next event, in slices: a signal that comes just before a thread blocks does not wake it."""
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = deadline - time.monotonic()
            try:
                return self._events.get(timeout=max(0.0, min(SLICE_S, left)))
            except queue.Empty:
                if left <= SLICE_S:
                    raise TimeoutError from None

    def wait_ready(self, is_ready: Callable[[], bool], timeout_s: float, poll_s: float = 0.02) -> None:
        """Blocks until `is_ready()`; raises like `wait`, TimeoutError after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not ready after {timeout_s:g} s")
            with contextlib.suppress(TimeoutError):
                self.wait(poll_s)

    def ask_to_stop(self) -> None:
        """Wakes `wait` with StopAsked; called again, makes a `stop` in progress a forced one. For signal handlers."""
        self._stop_requests += 1
        self._events.put(None)

    def stop(self, *, at_once: bool = False, grace_s: float = 40.0) -> bool:
        """Ends every program and returns when none is left; True if all ended by themselves.

        Args:
            at_once: all together: SIGTERM, again after 0.5 s, SIGKILL after 3 s. Else one after the other, the last
                started first, each with SIGTERM and `grace_s` seconds to finish its work; from a second
                `ask_to_stop` on, as with `at_once`.
            grace_s: seconds for each program.
        """
        self._stopping = True
        asked = max(1, self._stop_requests)
        children = list(self._children.values())[::-1]
        if not at_once:
            for child in children:
                _signal(child, signal.SIGTERM)
                deadline = time.monotonic() + grace_s
                while _alive([child]) and time.monotonic() < deadline and self._stop_requests <= asked:
                    _wait([child], 0.05)
                if _alive([child]):
                    break
        return self._end_now(children)

    def _end_now(self, children: list[_Child]) -> bool:
        left = _alive(children)
        started = time.monotonic()
        for child in left:
            _signal(child, signal.SIGTERM)
        _wait(left, SECOND_SIGNAL_S)
        for child in _alive(left):
            _signal(child, signal.SIGTERM)
        _wait(left, started + KILL_S - time.monotonic())
        killed = _alive(left)
        for child in killed:
            _signal(child, signal.SIGKILL)
        _wait(killed, 10.0)
        return not killed

    def _read(self, child: _Child) -> None:
        stream: IO[str] = child.process.stdout  # type: ignore[assignment]  # it is a pipe
        with stream:
            for line in stream:
                text = line.rstrip("\r\n")
                child.lines.append(text)
                if self._on_line is not None:
                    self._on_line(child.program.name, text)

    def _await_end(self, child: _Child, reader: threading.Thread) -> None:
        child.process.wait()
        reader.join(READ_LAST_LINES_S)  # a grandchild may hold the pipe open for ever
        if not self._stopping:
            self._events.put(child.program.name)

    def _death_of(self, child: _Child) -> Death:
        name, lines = child.program.name, list(child.lines)
        last = next((line for line in reversed(lines) if line.strip()), "")
        return Death(name, child.process.returncode, reason_of(name, lines), last)


def _signal(child: _Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.process.send_signal(number)


def _alive(children: Sequence[_Child]) -> list[_Child]:
    return [child for child in children if child.process.poll() is None]


def _wait(children: Sequence[_Child], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(0.0, deadline - time.monotonic()))
