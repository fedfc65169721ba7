"""Guarantees of `headrace trace`: every source, every drawing, and one sentence where there is nothing to draw."""

from __future__ import annotations

import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import otlp_file, perfetto, receipts, trace_page
from headrace.cli.__main__ import main
from headrace.cli.traces import Trace, TraceSpan
from headrace.v1 import generation_pb2
from tests.headrace.scripted_gateway import TIMINGS

A, B, STEP = "a" * 32, "b" * 32, "c" * 32
HOSTILE = "</script><script>alert(1)</script>\u2028"


def span(trace: str, span_id: str, name: str, service: str, start: int, ms: int, **more: Any) -> dict[str, Any]:
    """One span in OTLP's JSON, times in milliseconds after an epoch."""
    attributes = {"headrace.request.id": f"request-{trace[0]}", **more.get("attributes", {})}
    return {
        "service": service,
        "traceId": trace,
        "spanId": span_id,
        "parentSpanId": more.get("parent", ""),
        "name": name,
        "startTimeUnixNano": str((10_000 + start) * 1_000_000),
        "endTimeUnixNano": str((10_000 + start + ms) * 1_000_000),
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in attributes.items()],
        "links": [{"traceId": t, "spanId": s} for t, s in more.get("links", ())],
        "status": {"code": 2} if more.get("failed") else {},
    }


SPANS = [
    span(A, "a1", "headrace.v1.GatewayService/GenerateStream", "gateway", 0, 100, attributes={"x": HOSTILE}),
    span(A, "a2", "engine.request", "engine", 10, 80, parent="a1"),
    span(A, "a3", "engine.decode", "engine", 40, 50, parent="a2", links=[(STEP, "c1")]),
    span(B, "b1", "headrace.v1.GatewayService/Generate", "gateway", 5, 300, failed=True),
    span(B, "b2", "engine.prefill", "engine", 45, 20, parent="b1", links=[(STEP, "c1")]),
    span(STEP, "c1", "engine.step", "engine", 45, 20, links=[(A, "a3"), (B, "b2")]),
]


def otlp(spans: list[dict[str, Any]]) -> dict[str, Any]:
    resources = []
    for service in {one["service"] for one in spans}:
        about = [{"key": "service.name", "value": {"stringValue": f"headrace-{service}"}}]
        mine = [one for one in spans if one["service"] == service]
        resources.append({"resource": {"attributes": about}, "scopeSpans": [{"spans": mine}]})
    return {"resourceSpans": resources}


def jaeger_trace(trace_id: str) -> dict[str, Any]:
    """The same spans in Jaeger's JSON."""
    spans = []
    for one in (one for one in SPANS if one["traceId"] == trace_id):
        start_us = int(one["startTimeUnixNano"]) // 1000
        references = [{"refType": "CHILD_OF", "traceID": trace_id, "spanID": one["parentSpanId"]}]
        references += [
            {"refType": "FOLLOWS_FROM", "traceID": link["traceId"], "spanID": link["spanId"]} for link in one["links"]
        ]
        tags = [{"key": pair["key"], "value": pair["value"]["stringValue"]} for pair in one["attributes"]]
        if one["status"]:
            tags.append({"key": "error", "value": True})
        spans.append(
            {
                "traceID": trace_id,
                "spanID": one["spanId"],
                "operationName": one["name"],
                "references": references if one["parentSpanId"] else references[1:],
                "startTime": start_us,
                "duration": int(one["endTimeUnixNano"]) // 1000 - start_us,
                "tags": tags,
                "processID": one["service"],
            }
        )
    services = ("gateway", "engine")
    return {"spans": spans, "processes": {name: {"serviceName": f"headrace-{name}"} for name in services}}


@pytest.fixture
def jaeger_url() -> Iterator[str]:
    """A query API that knows three traces and can search by process and by tag."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            place = urllib.parse.urlsplit(self.path)
            query = urllib.parse.parse_qs(place.query)
            ids = [A, B, STEP]
            if place.path != "/api/traces":
                ids = [wanted for wanted in ids if place.path == f"/api/traces/{wanted}"]
            elif "tags" in query:
                tags = json.loads(query["tags"][0])
                ids = [wanted for wanted in (A, B) if tags == {"headrace.request.id": f"request-{wanted[0]}"}]
            elif query["service"] == ["headrace-engine"]:
                assert int(query["start"][0]) < int(query["end"][0])
            body = json.dumps({"data": [jaeger_trace(wanted) for wanted in ids] or None}).encode()
            self.send_response(200 if ids else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


@pytest.fixture
def spans_file(tmp_path: Path) -> Path:
    file = tmp_path / "spans.json"
    file.write_text(json.dumps(otlp(SPANS)))
    return file


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


def test_a_trace_by_either_id(jaeger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By trace id and by request id the same waterfall, parents first, failures marked."""
    for wanted in (B, "request-b"):
        assert main(["trace", wanted, "--jaeger", jaeger_url]) == 0
        drawn = capsys.readouterr().out
        assert f"trace {B}" in drawn
        assert drawn.index("Generate [gateway]") < drawn.index("  engine.prefill [engine]")
        assert "✗" in drawn


def test_the_slowest_first(jaeger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--slowest N` shows N requests, the slowest first, and no steps."""
    assert main(["trace", "--slowest", "1", "--jaeger", jaeger_url]) == 0
    assert re.findall("trace (.)", capsys.readouterr().out) == ["b"]
    assert main(["trace", "--slowest", "9", "--jaeger", jaeger_url]) == 0
    assert re.findall("trace (.)", capsys.readouterr().out) == ["b", "a"]


def test_the_slowest_of_remembered_receipts(capsys: pytest.CaptureFixture[str]) -> None:
    """Without Jaeger the receipts that are remembered are ordered by their totals."""
    assert main(["trace", "--slowest", "2"]) == 2
    assert "ask something first" in capsys.readouterr().err
    for number in (1, 3, 2):
        timings = type(TIMINGS)()
        timings.CopyFrom(TIMINGS)
        timings.total_ns *= number
        receipts.remember(receipts.Receipt(f"{number}" * 32, "r", "m", "now", 1, generation_pb2.Usage(), timings))
    assert main(["trace", "--slowest", "2"]) == 0
    assert re.findall("receipt of trace (.)", capsys.readouterr().out) == ["3", "2"]


def test_a_page_needs_nothing_beside_it(spans_file: Path, tmp_path: Path) -> None:
    """The page has every span, refers to nothing outside, and what a span says cannot become markup."""
    page = tmp_path / "trace.html"
    assert main(["trace", str(spans_file), "--html", str(page)]) == 0
    text = page.read_text()
    for one in SPANS[:5]:
        assert one["name"] in text
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?://""", text)
    assert "default-src 'none'" in text
    assert text.count("</script>") == 1
    assert "\u2028" not in text
    data = json.loads(re.search(r"const data = (\{.*\});", text).group(1))
    assert data["traces"][0]["spans"][0]["attributes"]["x"] == HOSTILE


@pytest.mark.parametrize("source", ["file", "jaeger"])
def test_requests_of_an_engine_share_a_timeline_with_its_steps(
    source: str, spans_file: Path, jaeger_url: str, tmp_path: Path
) -> None:
    """A Chrome trace: one process an engine, a row of steps, a row a request, arrows from steps to phases."""
    target = tmp_path / "trace.perfetto"
    which = [str(spans_file)] if source == "file" else [A, "--jaeger", jaeger_url]
    assert main(["trace", *which, "--perfetto", str(target)]) == 0
    events = json.loads(target.read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(processes.values()) == ["gateway", "engine"]
    engine = next(pid for pid, name in processes.items() if name == "engine")
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == engine}
    assert rows == {1: "steps", 2: "request request-a", 3: "request request-b"}
    placed = {e["args"]["span"]: e for e in events if e["ph"] == "X"}
    assert set(placed) == {"a1", "a2", "a3", "b1", "b2", "c1"}
    assert {placed[name]["pid"] for name in ("a2", "a3", "b2", "c1")} == {engine}
    assert (placed["c1"]["tid"], placed["c1"]["ts"], placed["c1"]["dur"]) == (1, 45_000, 20_000)
    ends = [(e["pid"], e["tid"]) for e in events if e["ph"] == "f"]
    assert sorted(ends) == [(engine, 2), (engine, 3)]


def test_rows_hold_what_nests() -> None:
    """Chrome's format wants the spans of a row nested or apart: what overlaps gets a further row of the request."""
    spans = [
        TraceSpan(A, "o", "", "outer", "stream", 0, 100),
        TraceSpan(A, "p", "o", "from 10 to 60", "stream", 10, 50),
        TraceSpan(A, "q", "o", "from 40 to 90", "stream", 40, 50),
        TraceSpan(A, "r", "o", "from 60 to 80", "stream", 60, 20),
        TraceSpan(STEP, "s", "", "engine.step", "engine", 70, 5),
        TraceSpan(A, "t", "", "before the steps", "engine", 1, 5),
    ]
    events = perfetto.chrome_trace(spans)["traceEvents"]
    rows = {e["args"]["span"]: e["tid"] for e in events if e["ph"] == "X"}
    assert rows == {"o": 2, "p": 2, "q": 3, "r": 2, "t": 2, "s": 1}


def test_lines_of_a_collector(tmp_path: Path) -> None:
    """A file exporter writes one document a line; both ways are read."""
    file = tmp_path / "lines.json"
    file.write_text("".join(f"{json.dumps(otlp([one]))}\n" for one in SPANS))
    assert otlp_file.looks_like(file)
    assert {one.span_id for one in otlp_file.load(file)} == {one["spanId"] for one in SPANS}


@pytest.mark.parametrize(
    "text", ['{"resourceSpans": 3}', '{"resourceSpans": [{"scopeSpans": [{"spans": [{}]}]}]}', '{"resourceSpans": [']
)
def test_a_broken_file_is_one_sentence(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that is no OTLP after all: exit code 2 and one line that names it."""
    file = tmp_path / "broken.json"
    file.write_text(text)
    assert main(["trace", str(file)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--slowest", "3"], ["deadbeef"], ["no-such-request"]])
def test_jaeger_down_is_one_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Jaeger does not answer: exit code 2, one line."""
    assert main(["trace", *arguments, "--jaeger", "http://127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert "does not answer" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("wanted", ["d" * 32, "request-x"])
def test_unknown_ids_are_one_sentence(wanted: str, jaeger_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An id that nobody knows: exit code 2, one line."""
    assert main(["trace", wanted, "--jaeger", jaeger_url]) == 2
    assert f"no trace {wanted}" in capsys.readouterr().err


def test_a_file_that_cannot_be_written(spans_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and the option's name."""
    assert main(["trace", str(spans_file), "--html", "/no/such/place.html"]) == 2
    assert "--html /no/such/place.html" in capsys.readouterr().err


def test_strange_trees_are_drawn() -> None:
    """Missing parents, a span that is its own parent, circles, an empty trace: every span is there once."""
    one, two, three = (TraceSpan(A, name, parent, name, "", 0, 1) for name, parent in ("xy", "yx", "zz"))
    lost = TraceSpan(A, "l", "gone", "l", "", 5, 1)
    tree = Trace.of("t", [one, two, three, lost])
    assert sorted(span.span_id for span in tree.spans) == ["l", "x", "y", "z"]
    assert Trace.of("t", []).duration_ns == 0


def test_a_trace_with_gaps_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A span whose parent did not arrive: a line of text and the page's heading; a caller's own span is no gap."""
    root = span(A, "1", "headrace.v1.GatewayService/Generate", "gateway", 0, 9, parent="the-callers")
    lost = span(A, "2", "engine.request", "engine", 1, 2, parent="dropped")
    for spans, expected in (([root], False), ([root, lost], True)):
        file, page = tmp_path / "spans.json", tmp_path / "page.html"
        file.write_text(json.dumps(otlp(spans)))
        assert main(["trace", str(file), "--html", str(page)]) == 0
        said = "incomplete: the spans above 1 of these are not here"
        assert (said in capsys.readouterr().out) is (said in page.read_text()) is expected


def test_nothing_is_drawn_of_nothing() -> None:
    """No span at all is a document and a page all the same."""
    assert perfetto.chrome_trace([])["traceEvents"] == []
    assert "const data" in trace_page.render([], "nothing")
