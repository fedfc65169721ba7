"""Spans as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open. Knows the format alone.

One process a service. An engine's steps are its first row, and each request has a row below them, so that all of an
engine's requests share one timeline with its steps; arrows go from a step to the phases that it was part of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.cli.traces import ENGINE_STEP, REQUEST_ID, TraceSpan

_STEPS_ROW = 1
_ORDER = ("gateway", "tokenizer", "stream", "engine")
Event = dict[str, Any]


def chrome_trace(spans: Sequence[TraceSpan]) -> dict[str, Any]:
    """The document. Times are microseconds since the first span's start."""
    origin_ns = min((span.start_ns for span in spans), default=0)
    services = sorted({span.service for span in spans}, key=lambda s: (_ORDER.index(s) if s in _ORDER else 9, s))
    processes = {service: number for number, service in enumerate(services, 1)}
    events: list[Event] = []
    for service, process in processes.items():
        events.append(_named("process_name", process, 0, service or "spans"))
        events.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
    rows = _Rows()
    places: dict[str, tuple[int, int, float]] = {}
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.duration_ns)):
        row = rows.of(span)
        start_us = (span.start_ns - origin_ns) / 1000
        places[span.span_id] = (processes[span.service], row, start_us)
        events.append(_complete(span, processes[span.service], row, start_us))
    events += [_named("thread_name", processes[service], row, title) for service, row, title in rows.titles]
    events += _arrows(spans, places)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


class _Rows:
    """Gives each span a row: its request's in its service. Spans of a row are nested or follow one another.

    A span that would overlap another without being inside it gets a further row of the same request. Spans come by
    start, longer ones first.
    """

    def __init__(self) -> None:
        self.titles: list[tuple[str, int, str]] = []  # (service, row, title)
        self._rows: dict[tuple[str, str], list[tuple[int, list[int]]]] = {}  # rows, and the ends of their open spans
        self._counts: dict[str, int] = {}

    def of(self, span: TraceSpan) -> int:
        """The row of the next span."""
        is_step = span.name == ENGINE_STEP
        rows = self._rows.setdefault((span.service, ENGINE_STEP if is_step else span.trace_id), [])
        for row, ends in rows:
            while ends and ends[-1] <= span.start_ns:
                ends.pop()
            if not ends or span.end_ns <= ends[-1]:
                ends.append(span.end_ns)
                return row
        row = self._new(span, is_step=is_step and not rows)
        rows.append((row, [span.end_ns]))
        return row

    def _new(self, span: TraceSpan, *, is_step: bool) -> int:
        who = str(span.attributes.get(REQUEST_ID) or span.trace_id)
        title = "steps" if span.name == ENGINE_STEP else f"request {who[:12]}"
        self._counts[span.service] = self._counts.get(span.service, _STEPS_ROW) + (not is_step)
        row = _STEPS_ROW if is_step else self._counts[span.service]
        self.titles.append((span.service, row, title))
        return row


def _named(what: str, process: int, row: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": row, "args": {"name": name}}


def _complete(span: TraceSpan, process: int, row: int, start_us: float) -> Event:
    about = {"trace": span.trace_id, "span": span.span_id, **span.attributes}
    if span.error:
        about["error"] = span.error
    event = {"ph": "X", "name": span.name, "cat": span.service, "pid": process, "tid": row}
    return {**event, "ts": start_us, "dur": span.duration_ns / 1000, "args": about}


def _arrows(spans: Sequence[TraceSpan], places: dict[str, tuple[int, int, float]]) -> list[Event]:
    """From each step to the phases that it links."""
    events: list[Event] = []
    for span in spans:
        if span.name != ENGINE_STEP:
            continue
        process, row, start_us = places[span.span_id]
        for _, target in span.links:
            if target in places:
                number = len(events) // 2 + 1
                to_process, to_row, _ = places[target]
                flow = {"name": "part of", "cat": "step", "id": number, "ts": start_us}
                events.append({**flow, "ph": "s", "pid": process, "tid": row})
                events.append({**flow, "ph": "f", "bp": "e", "pid": to_process, "tid": to_row})
    return events
