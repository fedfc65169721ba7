"""Structured logs on standard error: a JSON object a line, or readable lines. Never a prompt, never a line a token.

A line is handed to a bounded queue; a thread renders and writes it, so that a reader of standard error who stops costs
lines, which are counted, and no request's time. Lines of single requests carry `trace_id` and `request_id`, bound
explicitly. They are chosen by trace id, so that all processes keep the same requests; warnings and errors always are.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import sys
import threading
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

import structlog

from services.common.settings import setting

Log = structlog.stdlib.BoundLogger

QUEUE_LINES = 4096
CLOSE_S = 1.0
_SERIOUS = ("warning", "error", "critical")


@dataclass(frozen=True)
class LogSettings:
    """What is logged, and how it looks."""

    SECTION = "LOG"
    level: str = setting("info", "least severe level", choices=("debug", "info", "warning", "error"))
    format: str = setting("json", "json, or console for people", choices=("json", "console"))
    sample_ratio: float = setting(
        1.0, "share of requests whose lines are written; warnings and errors always are", minimum=0.0, maximum=1.0
    )


@dataclass
class LogCounts:
    """What became of lines."""

    written: int = 0
    dropped: int = 0  # the queue was full
    sampled_out: int = 0


@dataclass
class LogWriter:
    """The queue and the thread behind it. `put` never blocks; after `close` lines are written at once.

    Args:
        render: an event as a line.
        stream: where lines go.
        capacity: most lines that wait.
    """

    render: Any
    stream: TextIO
    capacity: int = QUEUE_LINES
    counts: LogCounts = field(default_factory=LogCounts)

    def __post_init__(self) -> None:
        self._queue: queue.Queue[MutableMapping[str, Any] | None] = queue.Queue(self.capacity)
        self._thread = threading.Thread(target=self._write_for_ever, name="headrace-log", daemon=True)
        self._closed = False
        self._thread.start()

    def put(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> str:
        """The last processor of structlog's chain: takes the event out of the caller's hands."""
        if self._closed:
            self._write(event)
        else:
            try:
                self._queue.put_nowait(event)
            except queue.Full:
                self.counts.dropped += 1
        raise structlog.DropEvent

    def close(self) -> None:
        """Writes what waits, for at most `CLOSE_S`."""
        self._closed = True
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._thread.join(CLOSE_S)

    def _write_for_ever(self) -> None:
        while (event := self._queue.get()) is not None:
            self._write(event)

    def _write(self, event: MutableMapping[str, Any]) -> None:
        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
            self.stream.write(f"{self.render(None, '', event)}\n")
            self.stream.flush()
            self.counts.written += 1


_writer: LogWriter | None = None  # of this process: structlog is configured once


def configure(service: str, settings: LogSettings) -> Log:
    """Sets this process up for logging and returns its logger, with the service's name bound."""
    global _writer  # noqa: PLW0603
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    logging.basicConfig(stream=sys.stderr, level=max(level, logging.WARNING), format="%(name)s: %(message)s")
    json_lines = settings.format == "json"
    _writer = LogWriter(
        structlog.processors.JSONRenderer(default=str)
        if json_lines
        else structlog.dev.ConsoleRenderer(colors=False, pad_event_to=0),
        sys.stderr,
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            _Chosen(settings.sample_ratio, _writer.counts),
            structlog.processors.TimeStamper(fmt="iso" if json_lines else "%H:%M:%S", utc=True),
            structlog.processors.format_exc_info,
            _writer.put,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    return cast("Log", structlog.get_logger(service=service))


def counts() -> LogCounts:
    """What became of this process' lines."""
    return _writer.counts if _writer is not None else LogCounts()


def close() -> None:
    """Writes what waits; what is logged later is written at once."""
    if _writer is not None:
        _writer.close()


class _Chosen:
    """Drops the lines of requests that are not chosen. By the end of the trace id, which is random."""

    def __init__(self, ratio: float, counts_: LogCounts) -> None:
        self._below = int(ratio * 0x1_0000_0000)
        self._counts = counts_

    def __call__(self, _logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        trace_id = event.get("trace_id")
        if trace_id and event.get("level") not in _SERIOUS and int(trace_id[-8:], 16) >= self._below:
            self._counts.sampled_out += 1
            raise structlog.DropEvent
        return event
