"""Traces as one HTML page that needs nothing beside it: no network, no other file. Knows no source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from headrace.cli.traces import Trace

_PLACE = '"HEADRACE_DATA"'


def render(traces: Sequence[Trace], title: str) -> str:
    """The page."""
    data = {"title": title, "traces": [_plain(trace) for trace in traces]}
    return fill("trace.html", data)


def fill(page: str, data: Any) -> str:
    """A page of `pages/` with its data in it, as JSON that cannot end the script that holds it."""
    template = resources.files("headrace.cli").joinpath("pages", page).read_text(encoding="utf-8")
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=str)
    safe = text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return template.replace(_PLACE, safe)


def _plain(trace: Trace) -> dict[str, Any]:
    origin_ns = min((span.start_ns for span in trace.spans), default=0)
    return {
        "title": " · ".join((trace.title, *trace.warnings)),
        "ms": trace.duration_ns / 1e6,
        "spans": [
            {
                "id": span.span_id,
                "name": span.name,
                "service": span.service,
                "depth": depth,
                "start": (span.start_ns - origin_ns) / 1e6,
                "ms": span.duration_ns / 1e6,
                "error": span.error,
                "attributes": span.attributes,
                "links": [f"{trace_id} / {span_id}" for trace_id, span_id in span.links],
            }
            for span, depth in zip(trace.spans, trace.depths, strict=True)
        ],
    }
