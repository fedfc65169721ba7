"""The spans of one generation, built when it has ended. Knows the names, not the SDK."""

from __future__ import annotations

from opentelemetry.trace import Span

from headrace.v1 import engine_pb2
from services.common import names, telemetry
from services.engine.outputs import RequestOutput, RequestUsage
from services.engine.request import FinishReason


def record(telemetry_: telemetry.Telemetry, command: engine_pb2.OpenGeneration, output: RequestOutput) -> None:
    """Records `engine.request` and the phases that the generation reached, under the span that opened it.

    A failure marks only the phase that was active; a phase that never began is not invented.
    """
    usage = output.usage
    if usage is None or not command.traceparent:
        return
    clock = usage.clock
    parent = telemetry.extract({"traceparent": command.traceparent, "tracestate": command.tracestate})
    span = telemetry_.start(names.SPAN_ENGINE_REQUEST, parent=parent, start_ns=clock.arrival_ns)
    finish = output.finish or FinishReason.ERROR
    failed = "" if finish in (FinishReason.STOP, FinishReason.LENGTH) else finish.name
    if span.is_recording():
        span.set_attribute(names.REQUEST_ID, command.request_id)
        span.set_attribute(names.FINISH_REASON, finish.value)
        _record_phases(telemetry_, span, usage, failed)
    telemetry_.end(span, error=failed, end_ns=clock.finished_ns)


def _record_phases(telemetry_: telemetry.Telemetry, span: Span, usage: RequestUsage, failed: str) -> None:
    clock = usage.clock
    scheduled, first, ended = clock.first_scheduled_ns, clock.first_token_ns, clock.finished_ns
    telemetry_.phase(
        names.SPAN_ENGINE_QUEUE,
        span,
        clock.arrival_ns,
        scheduled or ended,
        {names.QUEUE_REASON: clock.queue_reason.value},
        error="" if scheduled else failed,
    )
    if scheduled:
        attributes: dict[str, telemetry.AttributeValue] = {
            names.TOKENS: usage.prompt_token_count,
            names.CACHED_TOKENS: usage.cached_token_count,
            names.CHUNKS: clock.prefill_chunk_count,
        }
        error = "" if first else failed
        telemetry_.phase(names.SPAN_ENGINE_PREFILL, span, scheduled, first or ended, attributes, error)
    if first:
        attributes = {
            names.STEPS: usage.output_token_count,
            names.ITL_P50_MS: clock.gap_ns(0.5) / 1e6,
            names.ITL_P99_MS: clock.gap_ns(0.99) / 1e6,
            names.ITL_MAX_MS: clock.gap_ns(1.0) / 1e6,
            names.STALLED_MS: clock.stalled_ns / 1e6,
            names.PAUSED_MS: clock.paused_ns / 1e6,
        }
        telemetry_.phase(
            names.SPAN_ENGINE_DECODE, span, first, ended if failed else clock.last_token_ns, attributes, failed
        )
