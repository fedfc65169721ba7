"""Spans as every source gives them and every drawing takes them. Knows no source and no drawing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.cli.waterfall import Bar

REQUEST_ID = "headrace.request.id"
GATEWAY_CALL = "GatewayService/"  # in the name of a trace's first span, below which all others are
GENERATE = "GatewayService/Generate"  # in the name of every request's first span
ENGINE_STEP = "engine.step"
OWN_TRACES = (ENGINE_STEP, "tokenizer.batch")  # no request's: traces of their own, linked to those of requests


@dataclass(frozen=True)
class TraceSpan:
    """One span. Ids in hexadecimal, times in epoch nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str  # "": a root, or its parent is not known
    name: str
    service: str  # "gateway"; "" where the source does not say
    start_ns: int
    duration_ns: int
    error: str = ""  # the reason; "" if all went well
    attributes: dict[str, Any] = field(default_factory=dict)
    links: tuple[tuple[str, str], ...] = ()  # (trace id, span id)

    @property
    def end_ns(self) -> int:
        """When it ended."""
        return self.start_ns + self.duration_ns


@dataclass(frozen=True)
class Trace:
    """The spans of one request, parents before children, children by start; `depths` are theirs in the tree."""

    title: str
    spans: tuple[TraceSpan, ...]
    depths: tuple[int, ...]

    @classmethod
    def of(cls, title: str, spans: Iterable[TraceSpan]) -> Trace:
        """Puts the spans in order. A span whose parent is missing is a root; so is one of a circle of parents."""
        by_id = {span.span_id: span for span in spans}
        children: dict[str, list[TraceSpan]] = defaultdict(list)
        for span in by_id.values():
            known = span.parent_id in by_id and span.parent_id != span.span_id
            children[span.parent_id if known else ""].append(span)
        ordered: dict[str, int] = {}
        for first in (children[""], by_id.values()):
            pending = [(span, 0) for span in _latest_first(first) if span.span_id not in ordered]
            while pending:
                span, depth = pending.pop()
                if span.span_id not in ordered:
                    ordered[span.span_id] = depth
                    pending += [(child, depth + 1) for child in _latest_first(children[span.span_id])]
        return cls(title, tuple(by_id[span_id] for span_id in ordered), tuple(ordered.values()))

    @property
    def duration_ns(self) -> int:
        """From the first start to the last end."""
        if not self.spans:
            return 0
        return max(span.end_ns for span in self.spans) - min(span.start_ns for span in self.spans)

    @property
    def warnings(self) -> list[str]:
        """What is known to be wrong with it, a line each."""
        ids = {span.span_id for span in self.spans}
        cut_off = sum(bool(s.parent_id) and s.parent_id not in ids and GATEWAY_CALL not in s.name for s in self.spans)
        return [f"incomplete: the spans above {cut_off} of these are not here"] if cut_off else []

    def bars(self) -> list[Bar]:
        """As the lines of a waterfall."""
        return [
            Bar(
                f"{span.name} [{span.service}]" if span.service else span.name,
                span.start_ns,
                span.duration_ns,
                depth,
                span.error,
                bool(span.error),
            )
            for span, depth in zip(self.spans, self.depths, strict=True)
        ]


def by_trace(spans: Sequence[TraceSpan]) -> dict[str, list[TraceSpan]]:
    """Spans by trace id, in order of first appearance."""
    found: dict[str, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        found[span.trace_id].append(span)
    return dict(found)


def _latest_first(spans: Iterable[TraceSpan]) -> list[TraceSpan]:
    return sorted(spans, key=lambda span: span.start_ns, reverse=True)
