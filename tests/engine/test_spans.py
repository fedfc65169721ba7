"""An engine's spans say what happened to a generation: phases it reached, the one that failed, who stalled it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.v1 import engine_pb2
from services.common import names, telemetry
from services.common.telemetry import Telemetry, TelemetrySettings
from services.engine.blame import MAX_CULPRITS, REST, SHOWN, Blame
from services.engine.outputs import RequestOutput, RequestUsage, StepFacts, StepMember
from services.engine.request import MAX_INTERVALS, Away, FinishReason, Interval, PreemptReason, RequestClock
from services.engine.spans import RequestSpans, record_step

MS = 1_000_000
T0 = 10_000 * MS
Recorded = dict[str, ReadableSpan]


class Recorder:
    """A telemetry whose spans can be read."""

    def __init__(self, **settings: object) -> None:
        self.exporter = InMemorySpanExporter()
        self.telemetry = Telemetry("engine", TelemetrySettings(**settings), self.exporter)
        self.parent = self.telemetry.start("Deliver")

    def open(self, request_id: str = "r1") -> RequestSpans:
        carrier = telemetry.inject(self.parent)
        command = engine_pb2.OpenGeneration(request_id=request_id, traceparent=carrier["traceparent"])
        return RequestSpans(self.telemetry, command, 0, T0)

    def spans(self) -> list[ReadableSpan]:
        self.telemetry.end(self.parent)
        self.telemetry.shutdown()
        assert self.telemetry.counts.started == self.telemetry.counts.ended
        return list(self.exporter.get_finished_spans())

    def by_name(self) -> Recorded:
        return {span.name: span for span in self.spans()}


def ending(finish: FinishReason, change: Callable[[RequestClock], None] = lambda _: None) -> RequestOutput:
    """The last news of a request that was scheduled after 5 ms, had its first token after 25 ms and ended at 100 ms."""
    clock = RequestClock(
        arrival_ns=T0,
        first_scheduled_ns=T0 + 5 * MS,
        first_token_ns=T0 + 25 * MS,
        last_token_ns=T0 + 90 * MS,
        finished_ns=T0 + 100 * MS,
    )
    change(clock)
    return RequestOutput(7, finish=finish, usage=RequestUsage(10, 0, 5, clock))


def failed(found: Recorded) -> set[str]:
    return {name for name, span in found.items() if not span.status.is_ok}


def not_started(clock: RequestClock) -> None:
    clock.first_scheduled_ns = clock.first_token_ns = clock.last_token_ns = 0


def no_token(clock: RequestClock) -> None:
    clock.first_token_ns = clock.last_token_ns = 0


def paused_at_the_end(clock: RequestClock) -> None:
    clock.was_away(Interval(Away.PREEMPTED, T0 + 30 * MS, T0 + 40 * MS, PreemptReason.KV, 8))
    clock.was_away(Interval(Away.PAUSED, T0 + 90 * MS, T0 + 100 * MS))


@pytest.mark.parametrize(
    ("finish", "change", "reached", "at_fault"),
    [
        (FinishReason.STOP, lambda _: None, {"queue", "prefill", "decode"}, set()),
        (FinishReason.CANCELLED, not_started, {"queue"}, {"queue"}),
        (FinishReason.DEADLINE_EXCEEDED, no_token, {"queue", "prefill"}, {"prefill"}),
        (FinishReason.ERROR, lambda _: None, {"queue", "prefill", "decode"}, {"decode"}),
        (
            FinishReason.CANCELLED,
            paused_at_the_end,
            {"queue", "prefill", "decode", "preempted", "paused"},
            {"paused"},
        ),
    ],
)
def test_only_the_active_phase_fails(finish, change, reached, at_fault):
    """Whatever the ending: phases that were reached, and of these only the active one has an error."""
    recorder = Recorder()
    recorder.open().end(ending(finish, change), [])
    found = recorder.by_name()
    assert {name.removeprefix("engine.") for name in found} == {"Deliver", "request"} | reached
    at_fault = {f"engine.{name}" for name in at_fault}
    assert failed(found) == at_fault | ({"engine.request"} if at_fault else set())
    assert {span.attributes[names.REQUEST_ID] for name, span in found.items() if name != "Deliver"} == {"r1"}


def test_each_preemption_says_why_and_what_it_cost():
    """Two preemptions: two spans, each with its own reason and the tokens that were computed again after it."""

    def preempted_twice(clock: RequestClock) -> None:
        clock.was_away(Interval(Away.PREEMPTED, T0 + 30 * MS, T0 + 40 * MS, PreemptReason.KV, 8))
        clock.was_away(Interval(Away.PREEMPTED, T0 + 60 * MS, T0 + 80 * MS, PreemptReason.SHARE, 16))
        assert (clock.preempted_ns, clock.recomputed_token_count) == (30 * MS, 24)

    recorder = Recorder()
    recorder.open().end(ending(FinishReason.STOP, preempted_twice), [])
    found = [span.attributes for span in recorder.spans() if span.name == names.SPAN_ENGINE_PREEMPTED]
    said = [(about[names.PREEMPTED_REASON], about[names.RECOMPUTED_TOKENS]) for about in found]
    assert said == [("kv", 8), ("share", 16)]


def test_a_stop_string_is_no_failure():
    """The stream process cancels because the answer is complete: nothing has an error."""
    recorder = Recorder()
    spans = recorder.open()
    spans.complete = True
    spans.end(ending(FinishReason.CANCELLED), [])
    found = recorder.by_name()
    assert failed(found) == set()
    assert found["engine.request"].attributes[names.FINISH_REASON] == "complete"


def test_intervals_are_remembered_up_to_a_bound():
    """Very many pauses: the sum holds all, the list the first of them."""
    clock = RequestClock()
    for number in range(3 * MAX_INTERVALS):
        clock.was_away(Interval(Away.PAUSED, number * 10, number * 10 + 4))
    assert clock.paused_ns == 12 * MAX_INTERVALS
    assert len(clock.intervals) == MAX_INTERVALS


def step(step_ns: int = 30 * MS, *members: tuple[int, int, bool]) -> StepFacts:
    decode = sum(count for _, count, decoding in members if decoding)
    prefill = sum(count for _, count, decoding in members if not decoding)
    return StepFacts(T0, step_ns, prefill, decode, len(members), tuple(StepMember(*member) for member in members))


def test_steps_and_phases_link_each_other():
    """Level 3: a step is a trace of its own, links each member's phase, and each phase links its steps."""
    recorder = Recorder(level=3)
    decoding, prefilling = recorder.open("a"), recorder.open("b")
    for _ in range(2):
        facts = step(30 * MS, (1, 1, True), (2, 30, False))
        record_step(recorder.telemetry, facts, list(zip(facts.members, (decoding, prefilling), strict=True)))
    decoding.end(ending(FinishReason.LENGTH), [("b", 29 * MS)])
    prefilling.end(ending(FinishReason.CANCELLED, no_token), [])
    spans = recorder.spans()
    steps = [span for span in spans if span.name == names.SPAN_ENGINE_STEP]
    phases = {
        span.context.span_id: span
        for span in spans
        if span.attributes.get(names.REQUEST_ID) == ("a" if span.name == names.SPAN_ENGINE_DECODE else "b")
        and span.name in (names.SPAN_ENGINE_DECODE, names.SPAN_ENGINE_PREFILL)
    }
    assert len(steps) == 2
    assert len({span.context.trace_id for span in spans}) == 3
    for one in steps:
        assert one.parent is None
        assert {link.context.span_id for link in one.links} == set(phases)
        assert one.attributes[names.STEP_MEMBERS] == ["a: 1", "b: 30"]
    for phase in phases.values():
        assert {link.context.span_id for link in phase.links} == {one.context.span_id for one in steps}
    decode = next(span for span in phases.values() if span.name == names.SPAN_ENGINE_DECODE)
    assert decode.attributes[names.STALLED_BY] == ["b: 29.0 ms"]


@pytest.mark.parametrize(("level", "step_ms", "expected"), [(2, 30, 0), (2, 1500, 1), (3, 30, 1), (0, 1500, 0)])
def test_slow_steps_are_recorded_at_every_level(level, step_ms, expected):
    """Below level 3 only steps over the threshold are recorded; with tracing off none."""
    recorder = Recorder(level=level)
    spans, facts = recorder.open(), step(step_ms * MS, (7, 1, True))
    record_step(recorder.telemetry, facts, [(facts.members[0], spans)])
    spans.end(ending(FinishReason.STOP), [])
    assert sum(span.name == names.SPAN_ENGINE_STEP for span in recorder.spans()) == expected


def test_blame_names_who_stalled_whom():
    """A decode is charged by shares of tokens; prompts are not charged with each other; the worst come first."""
    blame = Blame()
    who = {1: "a", 2: "b", 3: "c", 4: "d"}.get
    blame.add(step(100 * MS, (1, 1, True), (2, 1, True), (3, 90, False), (4, 8, False)), who)
    blame.add(step(100 * MS, (1, 1, True), (2, 1, True)), who)
    blame.add(step(100 * MS, (1, 1, True), (4, 99, False)), who)
    assert blame.take(1) == [("d", 107 * MS), ("c", 90 * MS)]
    assert blame.take(2) == [("c", 90 * MS), ("d", 8 * MS)]
    assert blame.take(2) == blame.take(3) == []


def test_blame_is_bounded():
    """Very many culprits: some are told apart, all are charged, few are shown."""
    blame = Blame()
    for number in range(10 * MAX_CULPRITS):
        blame.add(step(2 * MS, (1, 1, True), (100 + number, 1, False)), str)
    assert len(blame._lost_ns[1]) == MAX_CULPRITS + 1
    assert sum(blame._lost_ns[1].values()) == 10 * MAX_CULPRITS * MS
    shown = blame.take(1)
    assert len(shown) == SHOWN
    assert shown[0][0] == REST
