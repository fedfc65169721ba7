"""Logs never block, never lie about what was lost, and keep the same requests in every process."""

from __future__ import annotations

import io
import json
import threading

import pytest
import structlog

from services.common.logs import LogCounts, LogWriter, _Chosen


def put(writer: LogWriter, **event: object) -> None:
    with pytest.raises(structlog.DropEvent):
        writer.put(None, "info", dict(event))


def test_lines_are_written_by_a_thread_in_order():
    """What is put is written, in order, by the time close returns; later lines are written at once."""
    stream = io.StringIO()
    writer = LogWriter(structlog.processors.JSONRenderer(), stream)
    for number in range(100):
        put(writer, event="line", number=number)
    writer.close()
    put(writer, event="late", number=100)
    assert [json.loads(line)["number"] for line in stream.getvalue().splitlines()] == list(range(101))
    assert writer.counts == LogCounts(written=101)


class Blocked(io.StringIO):
    """A standard error that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def write(self, text: str) -> int:
        self.free.wait(10)
        return super().write(text)


def test_a_reader_who_stops_costs_lines_and_no_time():
    """A full queue drops and counts; putting never waits."""
    stream = Blocked()
    writer = LogWriter(structlog.processors.JSONRenderer(), stream, capacity=10)
    for number in range(50):
        put(writer, event="line", number=number)
    assert writer.counts.dropped >= 39
    stream.free.set()
    writer.close()
    assert writer.counts.written + writer.counts.dropped == 50


def test_lines_of_requests_are_sampled_by_trace_id():
    """About the ratio is kept, the same in every process; warnings and lines of no request always are."""
    counts = LogCounts()
    here, there = _Chosen(0.25, counts), _Chosen(0.25, LogCounts())

    def kept(chosen: _Chosen, **event: str) -> bool:
        try:
            chosen(None, "", dict(event))
        except structlog.DropEvent:
            return False
        return True

    ids = [f"{number * 2654435761 % 2**128:032x}" for number in range(4000)]
    chosen = [kept(here, level="info", trace_id=trace_id) for trace_id in ids]
    assert 800 < sum(chosen) < 1200
    assert chosen == [kept(there, level="info", trace_id=trace_id) for trace_id in ids]
    assert counts.sampled_out == 4000 - sum(chosen)
    assert all(kept(here, level="warning", trace_id=trace_id) for trace_id in ids[:50])
    assert kept(here, level="info", event="serving")
