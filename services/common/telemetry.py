"""The one file that touches the OpenTelemetry SDK and its exporter. Knows no service.

Spans are started here, never made current, and ended by whoever started them: context travels in arguments.
Phases are recorded late, from timestamps of `time.monotonic_ns`. Exporting happens on a thread of the SDK; a collector
that is absent, slow or broken costs dropped spans, which are counted, and at most `SHUTDOWN_S` at exit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.common import names
from services.common.settings import setting

EXPORT_TIMEOUT_S = 2.0
EXPORT_DELAY_MS = 500
EXPORT_QUEUE_SPANS = 16_384
SHUTDOWN_S = 3.0

AttributeValue = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, AttributeValue]

_PROPAGATOR = TraceContextTextMapPropagator()
_EMPTY = Context()  # an explicit parent everywhere: nothing is ever taken from the ambient context


@dataclass(frozen=True)
class TelemetrySettings:
    """Where spans go and how many."""

    SECTION = "TRACE"
    endpoint: str = setting("", "OTLP gRPC endpoint, http://host:port; empty: no export")
    sample_ratio: float = setting(1.0, "share of traces that are exported", minimum=0.0, maximum=1.0)
    level: int = setting(2, "0 off, 1 RPCs and phases, 2 sub-stages, 3 engine steps", minimum=0, maximum=3)


@dataclass
class SpanCounts:
    """Sampled spans of this process since start. Dropped: ended, and neither exported nor still queued."""

    started: int = 0
    ended: int = 0
    exported: int = 0
    failed: int = 0


class _CountingProcessor(SpanProcessor):
    def __init__(self, counts: SpanCounts) -> None:
        self._counts, self._lock = counts, threading.Lock()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        with self._lock:
            self._counts.started += 1

    def on_end(self, span: ReadableSpan) -> None:
        with self._lock:
            self._counts.ended += 1


class _CountingExporter(SpanExporter):
    def __init__(self, inner: SpanExporter, counts: SpanCounts) -> None:
        self._inner, self._counts = inner, counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._inner.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._counts.exported += len(spans)
        else:
            self._counts.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class Telemetry:
    """Spans of one process.

    Args:
        service: name of the process, "gateway"; exported as `service.name` "headrace-gateway".
        settings: endpoint, ratio, level.
        exporter: where spans go instead of the endpoint (tests).
    """

    def __init__(self, service: str, settings: TelemetrySettings, exporter: SpanExporter | None = None) -> None:
        self.level = settings.level
        self.counts = SpanCounts()
        exported = bool(settings.endpoint or exporter) and settings.level > 0
        ratio = settings.sample_ratio if exported else 0.0
        self._provider = TracerProvider(
            sampler=ParentBased(
                TraceIdRatioBased(ratio),
                remote_parent_sampled=TraceIdRatioBased(1.0 if exported else 0.0),
            ),
            resource=Resource.create({"service.name": f"headrace-{service}"}),
            shutdown_on_exit=False,
        )
        if exported:
            inner = exporter or OTLPSpanExporter(
                endpoint=settings.endpoint, insecure=not settings.endpoint.startswith("https"), timeout=EXPORT_TIMEOUT_S
            )
            self._provider.add_span_processor(_CountingProcessor(self.counts))
            self._provider.add_span_processor(
                BatchSpanProcessor(
                    _CountingExporter(inner, self.counts),
                    max_queue_size=EXPORT_QUEUE_SPANS,
                    schedule_delay_millis=EXPORT_DELAY_MS,
                )
            )
            for noisy in ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal"):
                logging.getLogger(noisy).setLevel(logging.CRITICAL)  # the counts say it, once a report
        self._tracer = self._provider.get_tracer("headrace", schema_url=names.SCHEMA_URL)
        self._epoch_offset_ns = time.time_ns() - time.monotonic_ns()

    def start(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: Span | Context | None = None,
        start_ns: int | None = None,
        attributes: Attributes | None = None,
        links: Sequence[Link] = (),
    ) -> Span:
        """A span that the caller must end. `start_ns` is of the monotonic clock; None: now."""
        return self._tracer.start_span(
            name,
            context=_context_of(parent),
            kind=kind,
            attributes=attributes,
            links=links,
            start_time=self.epoch_ns(start_ns if start_ns is not None else time.monotonic_ns()),
        )

    def phase(
        self,
        name: str,
        parent: Span | Context | None,
        start_ns: int,
        end_ns: int,
        attributes: Attributes | None = None,
        error: str = "",
    ) -> None:
        """Records a phase that is over, from monotonic timestamps. `error`: the reason, if it failed in this phase."""
        if self.level < 1:
            return
        span = self.start(name, parent=parent, start_ns=start_ns, attributes=attributes)
        self.end(span, error=error, end_ns=max(start_ns, end_ns))

    def end(self, span: Span, *, error: str = "", end_ns: int | None = None) -> None:
        """Ends a span; `error` is a reason of the error catalogue, "" where all went well."""
        if error:
            span.set_attribute(names.ERROR_TYPE, error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self.epoch_ns(end_ns if end_ns is not None else time.monotonic_ns()))

    def epoch_ns(self, monotonic_ns: int) -> int:
        """Wall-clock nanoseconds of a monotonic timestamp of this process."""
        return monotonic_ns + self._epoch_offset_ns

    @property
    def dropped(self) -> int:
        """Sampled spans that were lost because the collector did not take them."""
        backlog = self.counts.ended - self.counts.exported - self.counts.failed
        return self.counts.failed + max(0, backlog - EXPORT_QUEUE_SPANS)

    def shutdown(self) -> None:
        """Exports what is queued, for at most `SHUTDOWN_S`."""
        worker = threading.Thread(target=self._provider.shutdown, daemon=True)
        worker.start()
        worker.join(SHUTDOWN_S)


def _context_of(parent: Span | Context | None) -> Context:
    if parent is None:
        return _EMPTY
    if isinstance(parent, Context):
        return parent
    return trace.set_span_in_context(parent, _EMPTY)


def extract(metadata: Mapping[str, str]) -> Context:
    """The caller's trace context, from `traceparent` and `tracestate`; empty where there is none."""
    return _PROPAGATOR.extract(metadata, _EMPTY)


def inject(span: Span) -> dict[str, str]:
    """`traceparent` (and `tracestate`) of a span, to send along with a call."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, _EMPTY))
    return carrier


def trace_id(span: Span) -> str:
    """Trace id, 32 hexadecimal digits; set whether or not the span is sampled."""
    return f"{span.get_span_context().trace_id:032x}"
