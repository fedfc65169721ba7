"""Spans of traces that are not sampled: held until their request has ended, exported if it failed or was slow."""

from __future__ import annotations

import time

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common import names, telemetry
from services.common.span import MAX_HELD, MAX_LINKS
from services.common.telemetry import Telemetry, TelemetrySettings


def unsampled(**settings: object) -> tuple[Telemetry, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return Telemetry("test", TelemetrySettings(sample_ratio=0.0, **settings), exporter), exporter


def request(spans: Telemetry, *, error: str = "", took_ns: int = 1000) -> str:
    """A root with a call that has a phase, and a phase of its own; the error is the inner phase's."""
    now = time.monotonic_ns()
    root = spans.start("root", start_ns=now - took_ns)
    root.request_id = "r1"
    call = spans.start("call", parent=root, start_ns=now - took_ns)
    spans.phase("inner", call, now - 10, now, error=error)
    spans.end(call, end_ns=now)
    spans.phase("phase", root, now - 10, now)
    spans.end(root, end_ns=now)
    return telemetry.trace_id(root)


def test_a_request_that_went_well_leaves_nothing():
    """Not sampled, not failed, not slow: no span is made, nothing is counted."""
    spans, exporter = unsampled()
    request(spans)
    spans.shutdown()
    assert exporter.get_finished_spans() == ()
    assert (spans.counts.started, spans.counts.ended) == (0, 0)


def test_a_failed_request_is_exported_whole():
    """One failed phase: everything that this process recorded of the request, under the ids that were sent along."""
    spans, exporter = unsampled()
    trace_id = request(spans, error="KV_CAPACITY")
    request(spans)
    spans.shutdown()
    found = {span.name: span for span in exporter.get_finished_spans()}
    assert set(found) == {"root", "call", "inner", "phase"}
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {trace_id}
    assert found["inner"].parent.span_id == found["call"].context.span_id
    assert found["call"].parent.span_id == found["root"].context.span_id
    assert {span.attributes[names.LATE] for span in found.values()} == {"failed"}
    assert {span.attributes[names.REQUEST_ID] for span in found.values()} == {"r1"}
    assert [name for name, span in found.items() if not span.status.is_ok] == ["inner"]
    assert spans.counts.started == spans.counts.ended == spans.counts.exported == 4


def test_a_slow_request_is_exported():
    """Longer than the threshold in this process."""
    spans, exporter = unsampled(slow_ms=100.0)
    request(spans, took_ns=99_000_000)
    request(spans, took_ns=101_000_000)
    spans.shutdown()
    assert {span.attributes[names.LATE] for span in exporter.get_finished_spans()} == {"slow"}
    assert spans.counts.ended == 4


def test_what_is_held_is_bounded():
    """A request with very many phases keeps the first of them, and its root."""
    spans, exporter = unsampled()
    root = spans.start("root")
    for _ in range(3 * MAX_HELD):
        spans.phase("phase", root, 1, 2)
    for _ in range(2 * MAX_LINKS):
        root.add_link(spans.new_context())
    spans.end(root, error="INTERNAL")
    spans.shutdown()
    assert len(exporter.get_finished_spans()) == MAX_HELD + 1
    assert len(root.links) == MAX_LINKS


def test_late_spans_can_be_turned_off():
    """Then only the ratio decides, and nothing is kept."""
    spans, exporter = unsampled(late=False)
    request(spans, error="INTERNAL")
    assert not spans.start("root").is_recording()
    spans.shutdown()
    assert exporter.get_finished_spans() == ()


def test_levels():
    """A phase of a higher level than the process records is not recorded."""
    for level, expected in ((0, set()), (1, {"root", "calls"}), (2, {"root", "calls", "details"})):
        exporter = InMemorySpanExporter()
        spans = Telemetry("test", TelemetrySettings(level=level), exporter)
        root = spans.start("root")
        for name, needed in (("calls", telemetry.CALLS), ("details", telemetry.DETAILS), ("steps", telemetry.STEPS)):
            spans.phase(name, root, 1, 2, level=needed)
        spans.end(root)
        spans.shutdown()
        assert {span.name for span in exporter.get_finished_spans()} == expected


def test_a_full_queue_is_counted_exactly(monkeypatch):
    """Spans beyond the queue are dropped and counted; the others arrive."""
    monkeypatch.setattr(telemetry, "EXPORT_QUEUE_SPANS", 600)
    exporter = InMemorySpanExporter()
    spans = Telemetry("test", TelemetrySettings(), exporter)
    with spans._batch._batch_processor._export_lock:  # the collector is paused
        for _ in range(1000):
            spans.end(spans.start("span"))
    spans.shutdown()
    assert spans.counts.ended == 1000
    assert spans.counts.exported + spans.dropped == 1000
    assert 350 <= spans.dropped <= 400
