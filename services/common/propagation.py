"""How trace context and a request's id travel with calls. Knows OpenTelemetry's interface, not its SDK."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.common.span import Span

REQUEST_ID_KEY = "headrace-request-id"
_PROPAGATOR = TraceContextTextMapPropagator()
_EMPTY = Context()  # an explicit parent everywhere: nothing is ever taken from the ambient context


def span_context(parent: trace.Span | Context | None) -> SpanContext | None:
    """Ids of a parent; None where there is none."""
    if parent is None:
        return None
    span = trace.get_current_span(parent) if isinstance(parent, Context) else parent
    context = span.get_span_context()
    return context if context.is_valid else None


def extract(metadata: Mapping[str, str]) -> Context:
    """The caller's trace context, from `traceparent` and `tracestate`; empty where there is none."""
    return _PROPAGATOR.extract(metadata, _EMPTY)


def inject(span: trace.Span) -> dict[str, str]:
    """`traceparent` (and `tracestate`) of a span, and its request's id, to send along with a call."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span, _EMPTY))
    if isinstance(span, Span) and span.request_id:
        carrier[REQUEST_ID_KEY] = span.request_id
    return carrier


def trace_id(span: trace.Span) -> str:
    """Trace id, 32 hexadecimal digits; set whether or not the span is sampled."""
    return f"{span.get_span_context().trace_id:032x}"
