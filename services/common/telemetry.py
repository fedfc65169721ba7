"""The one file that touches the OpenTelemetry SDK and its exporter. Knows no service.

Spans are started here, never made current, and ended by whoever started them: context travels in arguments.
Phases are recorded late, from timestamps of `time.monotonic_ns`. Exporting happens on a thread of the SDK; a collector
that is absent, slow or broken costs dropped spans, which are counted, and at most `SHUTDOWN_S` at exit.

Which spans are exported: those of sampled traces (parent based, by ratio), at their end. Of the other traces, what this
process has recorded of a request that failed here, or took longer than `slow_ms` here; each process judges for itself,
so such a trace may have gaps. Its spans have the ids that were sent along anyway, so they fit together.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from services.common import metric_names, names
from services.common.metrics import Metrics
from services.common.propagation import extract, inject, span_context, trace_id
from services.common.settings import setting
from services.common.span import MAX_HELD, Span

EXPORT_TIMEOUT_S = 2.0
EXPORT_DELAY_MS = 500
EXPORT_QUEUE_SPANS = 16_384
SHUTDOWN_S = 3.0
SHUTDOWN_UNWELL_S = 0.5  # where the collector did not take the spans before
CALLS, DETAILS, STEPS = 1, 2, 3  # levels: RPCs and phases; sub-stages; engine steps

__all__ = ["CALLS", "DETAILS", "STEPS", "Telemetry", "TelemetrySettings", "extract", "inject", "trace_id"]

AttributeValue = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, AttributeValue]

_SAMPLED, _UNSAMPLED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)


@dataclass(frozen=True)
class TelemetrySettings:
    """Where spans go and how many."""

    SECTION = "TRACE"
    endpoint: str = setting("", "OTLP gRPC endpoint, http://host:port; empty: no export")
    sample_ratio: float = setting(1.0, "share of traces that are exported", minimum=0.0, maximum=1.0)
    level: int = setting(2, "0 off, 1 RPCs and phases, 2 sub-stages, 3 engine steps", minimum=0, maximum=3)
    slow_ms: float = setting(
        30_000.0, "unsampled requests that take longer in a process are exported; 0: none", minimum=0.0
    )
    slow_step_ms: float = setting(
        1_000.0, "engine steps that take longer are recorded at every level; 0: none", minimum=0.0
    )
    late: bool = setting(True, "whether unsampled requests that failed or were slow are exported")


@dataclass
class SpanCounts:
    """Spans of this process that are or will be exported. Dropped ones ended, and were not exported."""

    started: int = 0
    ended: int = 0
    exported: int = 0
    failed: int = 0  # the collector did not take them
    overflowed: int = 0  # the queue was full
    taken: int = 0  # by the exporting thread
    unwell: bool = False  # the collector did not take the last spans


class _CountingExporter(SpanExporter):
    def __init__(self, inner: SpanExporter, counts: SpanCounts) -> None:
        self._inner, self._counts = inner, counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            result = self._inner.export(spans)
        finally:
            self._counts.taken += len(spans)
            self._counts.unwell = result is not SpanExportResult.SUCCESS
            if result is SpanExportResult.SUCCESS:
                self._counts.exported += len(spans)
            else:
                self._counts.failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()


class Telemetry:
    """Spans and metrics of one process.

    Args:
        service: name of the process, "gateway"; exported as `service.name` "headrace-gateway".
        settings: endpoint, ratio, level, what is slow.
        exporter: where spans go instead of the endpoint (tests).
        credentials: of the connection to the endpoint; None: plain text; for https this machine's authorities.

    Attributes:
        level: how much is recorded.
        counts: what became of spans.
        metrics: counters, gauges, histograms.
        exports: whether spans go anywhere.
    """

    def __init__(
        self,
        service: str,
        settings: TelemetrySettings,
        exporter: SpanExporter | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.level = settings.level
        self.counts = SpanCounts()
        self.metrics = Metrics()
        self.metrics.each_second(self._sample)
        self.exports = bool(settings.endpoint or exporter) and settings.level > 0
        self._late = self.exports and settings.late
        self._slow_ns = int(settings.slow_ms * 1e6)
        self.slow_step_ns = int(settings.slow_step_ms * 1e6) if self.exports else 0
        self._lock = threading.Lock()
        self._ids = RandomIdGenerator()
        self._ratio = TraceIdRatioBased(settings.sample_ratio if self.exports else 0.0)
        self._resource = Resource.create({"service.name": f"headrace-{service}"})
        self._scope = InstrumentationScope("headrace", schema_url=names.SCHEMA_URL)
        self._provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        self._batch: BatchSpanProcessor | None = None
        if self.exports:
            inner = exporter or OTLPSpanExporter(
                endpoint=settings.endpoint
                if credentials is None
                else settings.endpoint.replace("http://", "https://", 1),
                insecure=credentials is None and not settings.endpoint.startswith("https"),
                credentials=credentials,
                timeout=EXPORT_TIMEOUT_S,
            )
            self._batch = BatchSpanProcessor(
                _CountingExporter(inner, self.counts),
                max_queue_size=EXPORT_QUEUE_SPANS,
                schedule_delay_millis=EXPORT_DELAY_MS,
            )
            self._provider.add_span_processor(self._batch)
            for noisy in ("opentelemetry.exporter.otlp.proto.grpc.exporter", "opentelemetry.sdk._shared_internal"):
                logging.getLogger(noisy).setLevel(logging.CRITICAL)  # the counts say it, once a report
        self._epoch_offset_ns = time.time_ns() - time.monotonic_ns()

    # --- spans ----------------------------------------------------------------------------------------

    def start(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        parent: trace.Span | Context | None = None,
        start_ns: int | None = None,
        attributes: Attributes | None = None,
        links: Sequence[Link] = (),
        sampled: bool | None = None,
        context: SpanContext | None = None,
        kept: bool = True,
    ) -> Span:
        """A span that the caller must end.

        Args:
            name: of `names`.
            kind: who is on the other side.
            parent: a span of this process, or a context that came with a call; None: the root of a new trace.
            start_ns: of the monotonic clock; None: now.
            attributes: to begin with.
            links: other spans that it has to do with.
            sampled: for a root, instead of the ratio.
            context: ids that were given out before (`new_context`).
            kept: False: it has ids and is never exported.
        """
        above = parent if isinstance(parent, Span) else None
        parent_context = span_context(parent)
        context = context or self.new_context(parent_context, sampled=sampled)
        in_sample = kept and bool(context.trace_flags.sampled) and self.exports
        span = Span(
            name,
            context,
            parent_context,
            above.local_root if above is not None else None,
            kind=kind,
            start_ns=self.epoch_ns(start_ns if start_ns is not None else time.monotonic_ns()),
            kept=in_sample or (kept and self._late),
            close=self._close,
        )
        if span.kept:
            if attributes:
                span.attributes.update(attributes)
            if links:
                span.add_links(links)
        if in_sample:
            with self._lock:
                self.counts.started += 1
        return span

    def new_context(self, parent: SpanContext | None = None, *, sampled: bool | None = None) -> SpanContext:
        """Ids for a span that does not exist yet, below `parent` or at the root of a new trace."""
        if parent is not None and parent.is_valid:
            flags, identity, state = parent.trace_flags, parent.trace_id, parent.trace_state
        else:
            identity, state = self._ids.generate_trace_id(), None
            if sampled is None:
                sampled = self._ratio.should_sample(None, identity, "").decision is not Decision.DROP
            flags = _SAMPLED if sampled and self.exports else _UNSAMPLED
        return SpanContext(identity, self._ids.generate_span_id(), False, flags, state)

    def phase(
        self,
        name: str,
        parent: trace.Span | Context | None,
        start_ns: int,
        end_ns: int,
        attributes: Attributes | None = None,
        error: str = "",
        *,
        level: int = CALLS,
        links: Sequence[Link] = (),
        context: SpanContext | None = None,
    ) -> None:
        """Records a phase that is over, from monotonic timestamps.

        Args:
            name: of `names`.
            parent: what it is a phase of.
            start_ns: when it began.
            end_ns: when it was over.
            attributes: what is known of it.
            error: the reason, if the request failed in this phase.
            level: least level at which it is recorded.
            links: other spans that it has to do with.
            context: ids that were given out before.
        """
        if self.level < level or (isinstance(parent, Span) and not parent.kept):
            return
        span = self.start(name, parent=parent, start_ns=start_ns, attributes=attributes, links=links, context=context)
        self.end(span, error=error, end_ns=max(start_ns, end_ns))

    def end(self, span: trace.Span, *, error: str = "", end_ns: int | None = None) -> None:
        """Ends a span; `error` is a reason of the error catalogue, "" where all went well."""
        if error:
            span.set_attribute(names.ERROR_TYPE, error)
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(self.epoch_ns(end_ns if end_ns is not None else time.monotonic_ns()))

    def epoch_ns(self, monotonic_ns: int) -> int:
        """Wall-clock nanoseconds of a monotonic timestamp of this process."""
        return monotonic_ns + self._epoch_offset_ns

    # --- what becomes of spans ------------------------------------------------------------------------

    def _close(self, span: Span) -> None:
        """A span has ended: export it, hold it, or judge what was held."""
        root = span.local_root
        if not span.kept:
            return
        if span.status.status_code is StatusCode.ERROR:
            root.failed = True
        if span.sampled and self.exports:
            with self._lock:
                self.counts.ended += 1
            self._export(span)
        elif span is not root and not root.end_ns:
            if len(root.held) < MAX_HELD:
                root.held.append(span)
        elif span is root:
            slow = 0 < self._slow_ns < span.end_ns - span.start_ns
            root.late = "failed" if root.failed else "slow" if slow else ""
            held, root.held = root.held, []
            if root.late:
                for late in (*held, root):
                    self._export_late(late, root.late)
        elif root.late:  # it ended after its local root
            self._export_late(span, root.late)

    def _export_late(self, span: Span, why: str) -> None:
        span.attributes[names.LATE] = why
        context = span.context
        span.context = SpanContext(context.trace_id, context.span_id, False, _SAMPLED, context.trace_state)
        with self._lock:
            self.counts.started += 1
            self.counts.ended += 1
        self._export(span)

    def _export(self, span: Span) -> None:
        if span.request_id:
            span.attributes.setdefault(names.REQUEST_ID, span.request_id)
        counts = self.counts
        with self._lock:
            if counts.ended - counts.overflowed - counts.taken > EXPORT_QUEUE_SPANS:
                counts.overflowed += 1
                return
        if self._batch is not None:
            self._batch.on_end(
                ReadableSpan(
                    span.name,
                    context=span.context,
                    parent=span.parent,
                    resource=self._resource,
                    attributes=span.attributes,
                    links=span.links,
                    kind=span.kind,
                    status=span.status,
                    start_time=span.start_ns,
                    end_time=span.end_ns,
                    instrumentation_scope=self._scope,
                )
            )

    @property
    def dropped(self) -> int:
        """Spans that were lost because the collector did not take them, or not fast enough."""
        return self.counts.failed + self.counts.overflowed

    def _sample(self) -> None:
        counts, metrics = self.counts, self.metrics
        metrics.total(metric_names.SPANS_STARTED, counts.started)
        metrics.total(metric_names.SPANS_ENDED, counts.ended)
        metrics.total(metric_names.SPANS_EXPORTED, counts.exported)
        metrics.total(metric_names.SPANS_DROPPED, self.dropped)

    def shutdown(self) -> None:
        """Exports what is queued, for at most `SHUTDOWN_S`; hardly waits for a collector that took nothing lately."""
        worker = threading.Thread(target=self._provider.shutdown, daemon=True)
        worker.start()
        worker.join(SHUTDOWN_UNWELL_S if self.counts.unwell else SHUTDOWN_S)
