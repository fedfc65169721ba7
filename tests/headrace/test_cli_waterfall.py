"""Guarantees of what is drawn: the stage table, the waterfall, and Jaeger's traces."""

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.cli import jaeger, receipts, stages, trace, waterfall
from headrace.cli.traces import Trace
from headrace.cli.waterfall import Bar
from headrace.v1 import generation_pb2, timings_pb2
from tests.headrace.scripted_gateway import TIMINGS, TRACE_ID


def test_stages_sum() -> None:
    """The first seven stages sum to the time to first token, all of them to the total."""
    assert sum(stage.duration_ns for stage in stages.first_token_stages(TIMINGS)) == 39_900_000
    assert abs(39_900_000 - TIMINGS.time_to_first_token_ns) <= TIMINGS.residual_ns
    assert sum(stage.duration_ns for stage in stages.all_stages(TIMINGS)) == TIMINGS.total_ns


def test_every_stage_is_in_the_table() -> None:
    """The table shows every stage, both sums, and what the receipt says beside."""
    timings = timings_pb2.StageTimings()
    timings.CopyFrom(TIMINGS)
    timings.queue_reason = timings_pb2.QUEUE_REASON_KV
    timings.paused_ns, timings.stalled_ns = 7_000_000, 8_000_000
    usage = generation_pb2.Usage(prompt_token_count=36, completion_token_count=3)
    text = io.StringIO()
    Console(file=text, width=160).print(stages.table(timings, usage, 101_000_000))
    drawn = text.getvalue()
    for stage in stages.all_stages(timings):
        assert f"{stage.name.replace('_', ' ')} " in drawn
    for fact in ("100.00", "40.0 %", "16 cached", "waited for kv", "p99 21.00 ms", "stalled by prefill 8.00 ms"):
        assert fact in drawn
    for fact in ("paused by the reader 7.00 ms", "36 prompt tokens, 3 generated", "101.00"):
        assert fact in drawn


def test_receipt_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered is what came; the last and any other is found by its ids; old ones are forgotten."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(receipts, "KEPT", 3)
    usage = generation_pb2.Usage(prompt_token_count=1)
    made = [receipts.Receipt(f"{n:032x}", f"r{n}", "m", "now", n, usage, TIMINGS) for n in range(5)]
    with pytest.raises(receipts.ReceiptError, match="no receipt"):
        receipts.last()
    for receipt in made:
        receipts.remember(receipt)
    assert receipts.last() == made[4]
    assert receipts.find(made[3].trace_id) == made[3]
    assert receipts.find("r2") == made[2]
    assert receipts.find("r1") is None
    assert len(list(receipts.directory().iterdir())) == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"timings": {"total_ns": "x"}}', '{"timings": 3}', "\xff"])
def test_broken_receipt(tmp_path: Path, text: str) -> None:
    """A file that is no receipt is one sentence that names it."""
    file = tmp_path / "r.json"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(receipts.ReceiptError, match=r"r\.json holds no receipt"):
        receipts.load(file)


def test_bars_of_a_receipt() -> None:
    """A receipt's bars follow one another and end where the request ends."""
    bars = trace.bars_of(TIMINGS)
    by_name = {bar.name: bar for bar in bars}
    assert by_name["prefill"].start_ns == sum(by_name[n].duration_ns for n in ("admit", "tokenize", "route")) + (
        by_name["transit"].duration_ns + by_name["queue"].duration_ns
    )
    end = by_name["tail"].start_ns + by_name["tail"].duration_ns
    assert abs(end - TIMINGS.total_ns) <= TIMINGS.residual_ns


def test_the_tail_begins_after_the_last_tokens_way() -> None:
    """A decode_delivery is a bar between decode and tail, or, where it is negative, an earlier tail."""
    for delivery_ns, drawn in ((7_000_000, True), (-2_000_000, False)):
        timings = timings_pb2.StageTimings(
            total_ns=50_000_000,
            time_to_first_token_ns=10_000_000,
            decode_ns=30_000_000,
            decode_delivery_ns=delivery_ns,
            tail_ns=10_000_000 - delivery_ns,
        )
        by_name = {bar.name: bar for bar in trace.bars_of(timings)}
        assert ("decode_delivery" in by_name) is drawn
        assert by_name["tail"].start_ns + by_name["tail"].duration_ns == timings.total_ns


def test_waterfall() -> None:
    """Bars start and end where their time does; the shortest is still seen; a failure is marked."""
    lines = waterfall.render([Bar("a", 0, 80), Bar("b", 40, 20, 1), Bar("c", 79, 1, 1, "oh", True)], width=60)
    cells = 60 - len("  ✗ c") - 14
    drawn = [line[len("  ✗ c") + 14 :] for line in lines]
    assert drawn[0] == "█" * cells
    assert drawn[1].startswith(" " * (cells // 2))
    assert len(drawn[1].rstrip()) == pytest.approx(cells * 0.75, abs=1)
    assert lines[2].startswith("  ✗ c")
    assert lines[2].endswith("  oh")
    assert set(drawn[2][: cells + 1]) - {" "}
    assert waterfall.render([]) == []


def test_waterfall_of_nothing_and_of_strange_times() -> None:
    """Zero, negative and very large durations are drawn without failing."""
    lines = waterfall.render([Bar("a", 0, 0), Bar("b", 5, -3), Bar("c", 10**18, 10**18)], width=10)
    assert len(lines) == 3


SPANS: dict[str, Any] = {
    "traceID": TRACE_ID,
    "processes": {"p1": {"serviceName": "headrace-gateway"}, "p2": {"serviceName": "headrace-engine"}},
    "spans": [
        {"spanID": "c", "operationName": "late", "startTime": 30, "duration": 5, "processID": "p2"},
        {"spanID": "a", "operationName": "root", "startTime": 10, "duration": 40, "processID": "p1"},
        {"spanID": "b", "operationName": "early", "startTime": 12, "duration": 8, "processID": "p2"},
    ],
}
SPANS["spans"][0]["references"] = [{"refType": "CHILD_OF", "spanID": "a"}]
SPANS["spans"][2]["references"] = [{"refType": "CHILD_OF", "spanID": "a"}]
SPANS["spans"][0]["tags"] = [{"key": "error", "value": True}, {"key": "error.type", "value": "KV_CAPACITY"}]


def test_jaeger_order() -> None:
    """Spans come parents first, children by start, with process and failure."""
    bars = Trace.of("t", jaeger.read(SPANS)).bars()
    assert [(bar.name, bar.depth) for bar in bars] == [
        ("root [gateway]", 0),
        ("early [engine]", 1),
        ("late [engine]", 1),
    ]
    assert (bars[2].failed, bars[2].note, bars[2].start_ns) == (True, "KV_CAPACITY", 30_000)


@pytest.fixture
def server() -> Iterator[str]:
    answers = {
        f"/api/traces/{TRACE_ID}": (200, json.dumps({"data": [SPANS]})),
        "/api/traces/e0": (200, '{"data": []}'),
        "/api/traces/e1": (200, '{"data": [{"spans": [{}]}]}'),
        "/api/traces/e2": (500, ""),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, '{"data": null}'))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_jaeger_fetch(server: str) -> None:
    """A trace that Jaeger has is fetched by its id."""
    assert len(jaeger.fetch(f"{server}/", TRACE_ID)) == 3


@pytest.mark.parametrize(
    ("trace_id", "sentence"),
    [
        ("none", "no trace none"),
        ("e0", "no trace e0"),
        ("../up", "no trace"),
        ("e1", "not as Jaeger"),
        ("e2", "HTTP 500"),
    ],
)
def test_jaeger_refuses(server: str, trace_id: str, sentence: str) -> None:
    """Every other answer is one sentence."""
    with pytest.raises(jaeger.JaegerError, match=sentence):
        jaeger.fetch(server, trace_id)


def test_jaeger_down() -> None:
    """No Jaeger, or an address that is none, is one sentence."""
    with pytest.raises(jaeger.JaegerError, match="does not answer"):
        jaeger.fetch("http://127.0.0.1:1", TRACE_ID)
    with pytest.raises(jaeger.JaegerError, match="expected http"):
        jaeger.fetch("file:///etc", TRACE_ID)
