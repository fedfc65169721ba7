"""Spans have the right parents, and a collector that is absent costs nothing but spans."""

from __future__ import annotations

import time

from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.common import telemetry
from services.common.telemetry import SHUTDOWN_S, Telemetry, TelemetrySettings


class Stuck(SpanExporter):
    """A collector that never answers."""

    def export(self, spans):
        time.sleep(60)
        return SpanExportResult.FAILURE

    def shutdown(self):
        pass


def test_phases_carry_parent_and_monotonic_times():
    """A late phase has the parent it was given and lasts as long as its timestamps say."""
    exporter = InMemorySpanExporter()
    spans = Telemetry("test", TelemetrySettings(), exporter)
    root = spans.start("root")
    now = time.monotonic_ns()
    spans.phase("phase", root, now - 5_000_000, now, {"headrace.tokens": 3}, error="KV_CAPACITY")
    spans.end(root)
    spans.shutdown()
    phase, parent = sorted(exporter.get_finished_spans(), key=lambda span: span.name)
    assert phase.parent.span_id == parent.context.span_id
    assert phase.end_time - phase.start_time == 5_000_000
    assert abs(phase.end_time - time.time_ns()) < 5e9
    assert phase.attributes == {"headrace.tokens": 3, "error.type": "KV_CAPACITY"}
    assert not phase.status.is_ok


def test_context_crosses_processes():
    """Inject and extract: same trace, child of the sender's span, same sampling decision."""
    exporter = InMemorySpanExporter()
    here, there = (
        Telemetry("a", TelemetrySettings(), InMemorySpanExporter()),
        Telemetry("b", TelemetrySettings(), exporter),
    )
    sender = here.start("sender")
    received = there.start("received", parent=telemetry.extract(telemetry.inject(sender)))
    received.end()
    there.shutdown()
    (span,) = exporter.get_finished_spans()
    assert span.parent.span_id == sender.get_span_context().span_id
    assert telemetry.trace_id(received) == telemetry.trace_id(sender)


def test_nothing_is_taken_from_the_ambient_context():
    """A span without a parent is a root, whatever is current."""
    from opentelemetry import trace

    spans = Telemetry("test", TelemetrySettings(), InMemorySpanExporter())
    with trace.use_span(spans.start("ambient")):
        assert spans.start("root").parent is None


def test_ids_exist_without_export():
    """No endpoint: nothing is recorded, and every request still has a trace id."""
    spans = Telemetry("test", TelemetrySettings())
    span = spans.start("root")
    assert not span.is_recording()
    assert int(telemetry.trace_id(span), 16)
    assert spans.counts.started == 0


def test_sampling_ratio_zero_records_nothing_but_follows_a_sampled_parent():
    """ParentBased: the caller's decision wins over the ratio."""
    spans = Telemetry("test", TelemetrySettings(sample_ratio=0.0, late=False), InMemorySpanExporter())
    assert not spans.start("root").is_recording()
    sampled = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    assert spans.start("child", parent=telemetry.extract(sampled)).is_recording()


def test_a_stuck_collector_does_not_hold_the_exit():
    """Shutdown is bounded."""
    spans = Telemetry("test", TelemetrySettings(), Stuck())
    spans.end(spans.start("root"))
    began = time.monotonic()
    spans.shutdown()
    assert time.monotonic() - began < SHUTDOWN_S + 1


def test_an_absent_collector_is_counted():
    """Spans that nobody took are counted as dropped, and nothing is raised."""
    spans = Telemetry("test", TelemetrySettings(endpoint="http://127.0.0.1:1"))
    spans.end(spans.start("root"))
    began = time.monotonic()
    spans.shutdown()
    assert time.monotonic() - began < SHUTDOWN_S + 1
    assert spans.dropped == 1
