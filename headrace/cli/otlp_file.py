"""Reads spans from a file of OTLP in JSON, as a collector's file exporter writes it: one document, or one a line."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace.cli.traces import TraceSpan

_ERROR_CODES = (2, "STATUS_CODE_ERROR")


class OtlpError(Exception):
    """The file holds no spans; the message is one line."""


def looks_like(file: Path) -> bool:
    """Whether a file may be OTLP in JSON."""
    with contextlib.suppress(OSError), file.open("rb") as opened:
        return b'"resourceSpans"' in opened.read(2000)
    return False


def load(file: Path) -> list[TraceSpan]:
    """Every span in the file. Raises OtlpError."""
    try:
        text = file.read_text(encoding="utf-8")
        return [span for document in _documents(text) for span in _spans(document)]
    except OSError as error:
        raise OtlpError(f"{file}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OtlpError(f"{file} holds no OTLP spans ({type(error).__name__}: {error})") from error


def _documents(text: str) -> Iterator[dict[str, Any]]:
    try:
        yield json.loads(text)
    except json.JSONDecodeError:
        for line in text.splitlines():
            if line.strip():
                yield json.loads(line)


def _spans(document: dict[str, Any]) -> Iterator[TraceSpan]:
    for resource in document["resourceSpans"]:
        about = _attributes(resource.get("resource", {}))
        service = str(about.get("service.name", "")).removeprefix("headrace-")
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                yield _span(span, service)


def _span(span: dict[str, Any], service: str) -> TraceSpan:
    start_ns, attributes = int(span["startTimeUnixNano"]), _attributes(span)
    failed = span.get("status", {}).get("code") in _ERROR_CODES
    return TraceSpan(
        trace_id=str(span["traceId"]),
        span_id=str(span["spanId"]),
        parent_id=str(span.get("parentSpanId", "")),
        name=str(span["name"]),
        service=service,
        start_ns=start_ns,
        duration_ns=int(span["endTimeUnixNano"]) - start_ns,
        error=str(attributes.get("error.type", "failed")) if failed else "",
        attributes=attributes,
        links=tuple((str(link["traceId"]), str(link["spanId"])) for link in span.get("links", ())),
    )


def _attributes(holder: dict[str, Any]) -> dict[str, Any]:
    return {pair["key"]: _value(pair["value"]) for pair in holder.get("attributes", ())}


def _value(value: dict[str, Any]) -> Any:
    kind, content = next(iter(value.items()))
    if kind == "arrayValue":
        return [_value(item) for item in content.get("values", ())]
    return int(content) if kind == "intValue" else content
