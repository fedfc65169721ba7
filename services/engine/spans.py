"""The spans of generations and of steps. Knows the names, not the SDK.

`engine.request` begins with the generation and ends with it, however it ends. Its phases are built then, from the clock
that the engine keeps anyway. Only their ids are given out earlier, so that a step can link the phase it was part of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from opentelemetry.trace import Link, SpanContext

from headrace.v1 import engine_pb2
from services.common import names, telemetry
from services.common.span import MAX_LINKS, Span
from services.engine.outputs import RequestOutput, RequestUsage, StepFacts, StepMember
from services.engine.request import Away, FinishReason, RequestClock

_SHOWN_MEMBERS = 64
_AWAY_NAMES = {Away.PREEMPTED: names.SPAN_ENGINE_PREEMPTED, Away.PAUSED: names.SPAN_ENGINE_PAUSED}


@dataclass(slots=True)
class _Phase:
    """A phase that is not over: its ids, and the steps that were part of it."""

    context: SpanContext
    links: list[Link] = field(default_factory=list)


class RequestSpans:
    """One generation's spans. `end` or `fail` is called exactly once.

    Attributes:
        span: `engine.request`.
        complete: the reader has all it wants; a cancel is then no failure.
    """

    def __init__(
        self, telemetry_: telemetry.Telemetry, command: engine_pb2.OpenGeneration, index: int, arrival_ns: int
    ) -> None:
        parent = telemetry.extract({"traceparent": command.traceparent, "tracestate": command.tracestate})
        self._telemetry = telemetry_
        self.complete = False
        self.span: Span = telemetry_.start(
            names.SPAN_ENGINE_REQUEST, parent=parent, start_ns=arrival_ns, kept=bool(command.traceparent)
        )
        self.span.request_id = command.request_id
        if command.n > 1:
            self.span.set_attribute(names.ANSWER, index)
        self._phases: dict[str, _Phase] = {}

    def was_in(self, step: SpanContext, member: StepMember) -> Link | None:
        """Links a step with the phase that it was part of; the link the other way is returned."""
        if not self.span.kept:
            return None
        name = names.SPAN_ENGINE_DECODE if member.decoding else names.SPAN_ENGINE_PREFILL
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase(self._telemetry.new_context(self.span.context))
        if len(phase.links) < MAX_LINKS:
            phase.links.append(Link(step))
        return Link(phase.context)

    def fail(self, reason: str) -> None:
        """Ends the span of a generation that the engine never took, or lost."""
        self._telemetry.end(self.span, error=reason)

    def end(self, output: RequestOutput, stalled_by: Sequence[tuple[str, int]]) -> None:
        """Records the phases that the generation reached, and ends the span.

        A failure marks only the phase that was active; a phase that never began is not invented.

        Args:
            output: the generation's last news.
            stalled_by: request ids and nanoseconds of those whose prefill stalled it.
        """
        finish, usage = output.finish or FinishReason.ERROR, output.usage
        satisfied = self.complete and finish is FinishReason.CANCELLED
        failed = "" if satisfied or finish in (FinishReason.STOP, FinishReason.LENGTH) else finish.name
        if usage is None:
            self.fail(failed)
            return
        if self.span.is_recording():
            self.span.set_attribute(names.FINISH_REASON, "complete" if satisfied else finish.value)
            self._record_phases(usage, failed, stalled_by)
        self._telemetry.end(self.span, error=failed, end_ns=usage.clock.finished_ns)

    def _record_phases(self, usage: RequestUsage, failed: str, stalled_by: Sequence[tuple[str, int]]) -> None:
        clock = usage.clock
        scheduled, first, ended = clock.first_scheduled_ns, clock.first_token_ns, clock.finished_ns
        away = self._record_intervals(clock, failed)
        failed = "" if away else failed
        self._record(
            names.SPAN_ENGINE_QUEUE,
            clock.arrival_ns,
            scheduled or ended,
            {names.QUEUE_REASON: clock.queue_reason.value},
            "" if scheduled else failed,
        )
        if scheduled:
            attributes: dict[str, telemetry.AttributeValue] = {
                names.TOKENS: usage.prompt_token_count,
                names.CACHED_TOKENS: usage.cached_token_count,
                names.CHUNKS: clock.prefill_chunk_count,
            }
            self._record(names.SPAN_ENGINE_PREFILL, scheduled, first or ended, attributes, "" if first else failed)
        if first:
            attributes = {
                names.STEPS: clock.decode_step_count,
                names.DRAFTED_TOKENS: clock.drafted_token_count,
                names.ACCEPTED_TOKENS: clock.accepted_token_count,
                names.ITL_P50_MS: clock.gap_ns(0.5) / 1e6,
                names.ITL_P99_MS: clock.gap_ns(0.99) / 1e6,
                names.ITL_MAX_MS: clock.gap_ns(1.0) / 1e6,
                names.STALLED_MS: clock.stalled_ns / 1e6,
                names.PAUSED_MS: clock.paused_ns / 1e6,
            }
            if stalled_by:
                attributes[names.STALLED_BY] = [f"{who}: {lost_ns / 1e6:.1f} ms" for who, lost_ns in stalled_by]
            self._record(names.SPAN_ENGINE_DECODE, first, ended if failed else clock.last_token_ns, attributes, failed)

    def _record_intervals(self, clock: RequestClock, failed: str) -> bool:
        """Records times of being preempted or paused; True where the request ended within one of them."""
        within = False
        for interval in clock.intervals:
            last = bool(failed) and interval.end_ns == clock.finished_ns and not within
            within = within or last
            attributes: dict[str, telemetry.AttributeValue] = {}
            if interval.reason is not None:
                attributes[names.PREEMPTED_REASON] = interval.reason.value
                attributes[names.RECOMPUTED_TOKENS] = interval.recomputed_token_count
            self._telemetry.phase(
                _AWAY_NAMES[interval.why],
                self.span,
                interval.start_ns,
                interval.end_ns,
                attributes,
                failed if last else "",
                level=telemetry.DETAILS,
            )
        return within and self._telemetry.level >= telemetry.DETAILS

    def _record(self, name: str, start_ns: int, end_ns: int, attributes: telemetry.Attributes, error: str) -> None:
        phase = self._phases.get(name)
        self._telemetry.phase(
            name,
            self.span,
            start_ns,
            end_ns,
            attributes,
            error,
            links=phase.links if phase is not None else (),
            context=phase.context if phase is not None else None,
        )


def record_step(
    telemetry_: telemetry.Telemetry, facts: StepFacts, members: Sequence[tuple[StepMember, RequestSpans]]
) -> None:
    """Records a step as a trace of its own: at level 3 those of the sample, at every level those that were slow."""
    slow = 0 < telemetry_.slow_step_ns <= facts.step_ns
    if not slow and telemetry_.level < telemetry.STEPS:
        return
    context = telemetry_.new_context(sampled=True if slow else None)
    if not context.trace_flags.sampled:
        return
    links = [spans.was_in(context, member) for member, spans in members]
    who = [f"{spans.span.request_id}: {member.token_count}" for member, spans in members[:_SHOWN_MEMBERS]]
    telemetry_.phase(
        names.SPAN_ENGINE_STEP,
        None,
        facts.started_ns,
        facts.started_ns + facts.step_ns,
        {
            names.STEP_PREFILL_TOKENS: facts.prefill_token_count,
            names.STEP_DECODE_TOKENS: facts.decode_token_count,
            names.STEP_SEQUENCES: facts.sequence_count,
            names.STEP_MEMBERS: who,
        },
        links=[link for link in links if link is not None],
        context=context,
    )
