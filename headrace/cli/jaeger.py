"""Fetches traces from Jaeger's query API. Knows the format, nothing of drawing."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from headrace.cli.traces import GENERATE, REQUEST_ID, TraceSpan

TIMEOUT_S = 5.0
MOST_TRACES = 1000  # that one search brings
_TRACE_ID = re.compile(r"[0-9a-fA-F]{1,32}")


class JaegerError(Exception):
    """The trace cannot be had; the message is one line."""


def fetch(base_url: str, wanted: str) -> list[TraceSpan]:
    """The spans of a trace, by trace id or by the server's request id.

    Raises:
        JaegerError: Jaeger does not answer, does not know the trace, or answers something else.
    """
    if not _TRACE_ID.fullmatch(wanted):
        return _by_request_id(base_url, wanted)
    found = _get(base_url, f"traces/{wanted}")
    if not found and len(wanted) == 32:
        return _by_request_id(base_url, wanted)
    return found[0] if found else _unknown(wanted, base_url)


def search(base_url: str, service: str, **parameters: str | int) -> list[list[TraceSpan]]:
    """Traces with a span of a process ("gateway"). Raises JaegerError."""
    query = {"service": f"headrace-{service}", "limit": MOST_TRACES, **parameters}
    return _get(base_url, f"traces?{urllib.parse.urlencode(query)}")


def slowest(base_url: str, count: int) -> list[list[TraceSpan]]:
    """The slowest requests of the last day, slowest first. Raises JaegerError."""
    traces = search(base_url, "gateway", lookback="1d")

    def took_ns(spans: list[TraceSpan]) -> int:
        return max((s.duration_ns for s in spans if s.service == "gateway"), default=0)

    found = sorted((t for t in traces if any(GENERATE in s.name for s in t)), key=took_ns, reverse=True)
    if not found:
        raise JaegerError(f"Jaeger at {base_url} knows no request of the last day")
    return found[:count]


def around(base_url: str, spans: list[TraceSpan]) -> list[TraceSpan]:
    """Every span of engines within the time of these: what else ran there, and the steps. Raises JaegerError."""
    start_us = min(span.start_ns for span in spans) // 1000
    end_us = max(span.end_ns for span in spans) // 1000 + 1
    traces = search(base_url, "engine", start=start_us, end=end_us)
    return [span for trace in traces for span in trace]


def _by_request_id(base_url: str, wanted: str) -> list[TraceSpan]:
    tags = json.dumps({REQUEST_ID: wanted})
    found = search(base_url, "gateway", tags=tags, lookback="1d") if base_url else []
    return found[0] if found else _unknown(wanted, base_url)


def _get(base_url: str, path: str) -> list[list[TraceSpan]]:
    if not base_url.startswith(("http://", "https://")):
        raise JaegerError(f"--jaeger {base_url}: expected http://host:port")
    try:
        with urllib.request.urlopen(f"{base_url.rstrip('/')}/api/{path}", timeout=TIMEOUT_S) as answer:  # noqa: S310 - the scheme was checked
            return [read(trace) for trace in json.load(answer)["data"] or ()]
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (400, 404):
                return []
            raise JaegerError(f"Jaeger at {base_url} answers HTTP {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise JaegerError(f"Jaeger at {base_url} does not answer ({reason}); is it running?") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise JaegerError(f"{base_url} answers, but not as Jaeger's query API does") from None


def read(trace: dict[str, Any]) -> list[TraceSpan]:
    """The spans of a trace in Jaeger's JSON (its times are microseconds)."""
    processes = trace.get("processes", {})
    return [_span(span, processes) for span in trace["spans"]]


def _span(span: dict[str, Any], processes: dict[str, Any]) -> TraceSpan:
    tags = {tag["key"]: tag.get("value") for tag in span.get("tags", ())}
    failed = tags.get("error") in (True, "true") or tags.get("otel.status_code") == "ERROR"
    references = span.get("references", ())
    service = processes.get(span.get("processID", ""), {}).get("serviceName", "")
    return TraceSpan(
        trace_id=str(span.get("traceID", "")),
        span_id=str(span["spanID"]),
        parent_id=next((str(r["spanID"]) for r in references if r.get("refType") == "CHILD_OF"), ""),
        name=str(span["operationName"]),
        service=service.removeprefix("headrace-"),
        start_ns=int(span["startTime"]) * 1000,
        duration_ns=int(span["duration"]) * 1000,
        error=str(tags.get("error.type", "failed")) if failed else "",
        attributes=tags,
        links=tuple(
            (str(r.get("traceID", "")), str(r["spanID"])) for r in references if r.get("refType") == "FOLLOWS_FROM"
        ),
    )


def _unknown(wanted: str, base_url: str) -> list[TraceSpan]:
    raise JaegerError(f"no trace {wanted} is remembered here or known to Jaeger at {base_url}")
