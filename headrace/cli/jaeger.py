"""Fetches one trace from Jaeger's query API and puts its spans in order. Knows the format, nothing of drawing."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from typing import Any

from headrace.cli.waterfall import Bar

TIMEOUT_S = 5.0


class JaegerError(Exception):
    """The trace cannot be had; the message is one line."""


def fetch(base_url: str, trace_id: str) -> list[Bar]:
    """The spans of a trace as bars, parents before children, children by start.

    Raises:
        JaegerError: Jaeger does not answer, does not know the trace, or answers something else.
    """
    if not base_url.startswith(("http://", "https://")):
        raise JaegerError(f"--jaeger {base_url}: expected http://host:port")
    url = f"{base_url.rstrip('/')}/api/traces/{urllib.parse.quote(trace_id, safe='')}"
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - the scheme was checked
            traces = json.load(answer)["data"]
            return order(traces[0]) if traces else _unknown(trace_id, base_url)
    except urllib.error.HTTPError as error:
        with error:
            if error.code in (400, 404):
                _unknown(trace_id, base_url)
            raise JaegerError(f"Jaeger at {base_url} answers HTTP {error.code}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise JaegerError(f"Jaeger at {base_url} does not answer ({reason}); is it running?") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise JaegerError(f"{base_url} answers, but not as Jaeger's query API does") from None


def order(trace: dict[str, Any]) -> list[Bar]:
    """The spans of a trace in Jaeger's JSON as bars (its times are microseconds)."""
    spans = {span["spanID"]: span for span in trace["spans"]}
    children: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for span in spans.values():
        parents = [ref["spanID"] for ref in span.get("references", ()) if ref.get("refType") == "CHILD_OF"]
        children[next((parent for parent in parents if parent in spans), "")].append(span)
    bars: list[Bar] = []
    pending = [(span, 0) for span in sorted(children[""], key=_start, reverse=True)]
    while pending:
        span, depth = pending.pop()
        bars.append(_bar(span, depth, trace.get("processes", {})))
        pending += [(child, depth + 1) for child in sorted(children[span["spanID"]], key=_start, reverse=True)]
    return bars


def _bar(span: dict[str, Any], depth: int, processes: dict[str, Any]) -> Bar:
    tags = {tag["key"]: tag.get("value") for tag in span.get("tags", ())}
    service = processes.get(span.get("processID", ""), {}).get("serviceName", "")
    failed = tags.get("error") in (True, "true") or tags.get("otel.status_code") == "ERROR"
    name = f"{span['operationName']} [{service.removeprefix('headrace-')}]" if service else span["operationName"]
    note = str(tags.get("error.type", "failed")) if failed else ""
    return Bar(name, int(span["startTime"]) * 1000, int(span["duration"]) * 1000, depth, note, failed)


def _start(span: dict[str, Any]) -> int:
    return int(span["startTime"])


def _unknown(trace_id: str, base_url: str) -> list[Bar]:
    raise JaegerError(f"no trace {trace_id} is remembered here or known to Jaeger at {base_url}")
