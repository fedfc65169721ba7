"""What the pipeline tells about itself: never what callers said, and whatever the collector does."""

from __future__ import annotations

import json
import time
from collections import Counter

import pytest

from headrace import errors
from headrace.bench.collectors import MOODS, WELL, collector
from headrace.cli.pipeline import PipelineOptions, running
from tests.pipeline import scraping
from tests.pipeline.conftest import PROCESSES, until
from tests.pipeline.otlp import Receiver

CANARY = "xylophonequartz"
SETTINGS = {
    "HEADRACE_ENGINE_DTYPE": "float32",
    "HEADRACE_ENGINE_KV_BLOCKS": "1024",
    "HEADRACE_LOG_FORMAT": "json",
    "HEADRACE_LOG_LEVEL": "debug",
}


class Observed:
    """A running pipeline, what it logged, and where its metrics are."""

    def __init__(self, plan, lines) -> None:
        self.plan, self.lines = plan, lines

    def client(self):
        from headrace import Client

        return Client(self.plan.target)

    def metric(self, process: str, name: str, **labels: str) -> float:
        return scraping.value(scraping.scrape(self.plan.metrics[process]), name, **labels)

    def logged(self, event: str) -> list[dict]:
        found = [json.loads(line) for _, line in self.lines if line.startswith("{")]
        return [line for line in found if line["event"] == event]


def start(**variables: str):
    """A pipeline with metrics whose log lines are kept."""
    import contextlib

    @contextlib.contextmanager
    def started():
        lines: list[tuple[str, str]] = []
        settings = {**SETTINGS, **{f"HEADRACE_{name}": value for name, value in variables.items()}}
        settings |= {f"HEADRACE_{name}": port for name, port in scraping.endpoints().items()}
        options = PipelineOptions(variables=settings, ports=dict.fromkeys(PROCESSES, 0))
        with running(options, on_line=lambda name, line: lines.append((name, line)), timeout_s=60) as (plan, _):
            yield Observed(plan, lines)

    return started()


@pytest.fixture
def own_receiver():
    receiver = Receiver()
    yield receiver
    receiver.stop()


def test_nothing_that_callers_say_is_told(default_model_dir, own_receiver):
    """A canary in prompt, chat, stop string, metadata and answer is in no log line, no span and no metric."""
    spoken = []
    with start(TRACE_ENDPOINT=own_receiver.endpoint, TRACE_LEVEL="3") as observed, observed.client() as client:
        repeat = {"messages": [("user", f"Repeat this word: {CANARY}")], "temperature": 0, "max_tokens": 24}
        spoken.append(client.stream(**repeat).read_all().text)
        spoken.append(client.generate(f"{CANARY} {CANARY} {CANARY} {CANARY}", temperature=0, max_tokens=16).text)
        client.generate("Hi", max_tokens=4, stop=[CANARY], metadata={CANARY: CANARY})
        for bad in (
            {"prompt": CANARY * 20_000},
            {"prompt": CANARY, "temperature": -1},
            {"prompt": CANARY, "timeout": 0.001},
            {"messages": [("user", CANARY)], "model": "no-such-model"},
            {"messages": [("user", CANARY)], "stop": [""]},
        ):
            with pytest.raises(errors.HeadraceError):
                client.generate(**bad)
        stream = client.stream(f"{CANARY} {CANARY}", temperature=0, max_tokens=200, ignore_eos=True)
        next(iter(stream))
        stream.close()
        until(lambda: len(observed.logged("request")) >= 9, 10, "access log")
        metrics = "".join(scraping.text(observed.plan.metrics[process]) for process in PROCESSES)
    assert any(CANARY in text.lower() for text in spoken), spoken  # else this proves nothing
    assert len(own_receiver.everything()) > 50
    fragments = (CANARY, CANARY[:8], CANARY[-8:])
    for fragment in fragments:
        assert not [line for _, line in observed.lines if fragment in line.lower()]
        assert not [span for span in own_receiver.everything() if fragment in repr(span).lower()]
        assert fragment not in metrics.lower()


@pytest.fixture(scope="module")
def observed(default_model_dir):
    """A pipeline that exports no spans."""
    with start(GATEWAY_PRICE_HOURLY="3.5") as running_pipeline:
        yield running_pipeline


def test_one_access_line_a_request(observed):
    """Ids, counts and durations of each request, however it ended; no more of any request than that."""
    with observed.client() as client:
        answer = client.stream("Hello", temperature=0, max_tokens=5, ignore_eos=True).read_all()
        with pytest.raises(errors.InvalidArgument):
            client.generate("Hello", temperature=-1)
        until(lambda: len(observed.logged("request")) == 2, 10, "access log")
    good, bad = sorted(observed.logged("request"), key=lambda line: line["timestamp"])
    assert (good["trace_id"], good["request_id"]) == (answer.trace_id, answer.request_id)
    assert (good["method"], good["outcome"], good["completion_tokens"]) == ("GenerateStream", "length", 5)
    assert 0 < good["first_token_ms"] < good["total_ms"]
    assert (bad["method"], bad["outcome"], bad["completion_tokens"]) == ("Generate", "INVALID_FIELD", None)
    mine = [line for _, line in observed.lines if answer.trace_id in line]
    assert len(mine) == 1


def test_metrics_of_every_layer(observed):
    """Each process tells of itself and of what it did; numbers are those of the receipts."""
    with observed.client() as client:
        gateway = scraping.scrape(observed.plan.metrics["gateway"])
        answers = [client.stream("Hello", temperature=0, max_tokens=5, ignore_eos=True).read_all() for _ in range(3)]
        until(lambda: observed.metric("engine", "headrace_sequences", state="running") == 0, 10, "idle")
        value = observed.metric

        def blocks() -> float:
            return sum(value("engine", "headrace_kv_blocks", state=state) for state in ("used", "cached", "free"))

        until(lambda: blocks() > 0, 10, "sampled")

        def counted(name: str, **labels: str) -> float:
            return value("gateway", name, **labels) - scraping.value(gateway, name, **labels)

        assert counted("headrace_requests_total", method="GenerateStream", outcome="length") == 3
        assert counted("headrace_tokens_total", kind="completion", method="GenerateStream") == 15
        expected = sum(a.timings.time_to_first_token_ns for a in answers) / 1e9
        assert counted("gen_ai_server_time_to_first_token_seconds_sum") == pytest.approx(expected)
        assert value("gateway", "headrace_price_hourly") == 3.5
        until(lambda: value("gateway", "headrace_engine_serving") == 1, 10, "the engine serves")
        assert value("engine", "headrace_step_duration_seconds_count") >= 15
        assert value("engine", "headrace_inter_token_duration_seconds_count") >= 12
        assert blocks() == 1024
        assert value("engine", "headrace_host_gap_seconds_count") >= 12
        assert value("engine", "headrace_kv_wasted_tokens") == 0  # nothing runs
        for part in ("weights", "kv", "activations"):
            assert value("engine", "headrace_model_memory_bytes", part=part) > 1e6
        reserved, allocated = (
            value("engine", "headrace_allocator_memory_bytes", state=state) for state in ("reserved", "allocated")
        )
        assert reserved >= allocated > 1e8
        assert value("tokenizer", "headrace_tokenizer_tokens_total") >= 3
        until(lambda: value("stream", "headrace_stream_tokens_total") >= 15, 10, "deliveries ended")
        for process in PROCESSES:
            assert value(process, "process_memory_usage_bytes") > 1e7
            assert value(process, "process_cpu_time_seconds_total") > 0
            assert value(process, "headrace_loop_lag_seconds_count") >= 1
            assert value(process, "headrace_spans_started_total") == 0  # nothing is exported here
        assert "trace_id=" in scraping.text(observed.plan.metrics["gateway"])  # an exemplar


@pytest.mark.parametrize("mood", [mood for mood in MOODS if mood != WELL])
def test_a_bad_collector_changes_nothing_but_a_counter(default_model_dir, mood):
    """Absent, refusing, slow or paused: answers and log are as ever, spans are counted as dropped, exit is quick."""
    with collector(mood) as endpoint, start(TRACE_ENDPOINT=endpoint) as observed:
        with observed.client() as client:
            answers = [client.generate("Hello", temperature=0, max_tokens=6, ignore_eos=True) for _ in range(8)]
            assert len({answer.text for answer in answers}) == 1
            until(lambda: observed.metric("gateway", "headrace_spans_dropped_total") > 0, 20, "spans are dropped")
        began = time.monotonic()
    assert time.monotonic() - began < 10
    events = Counter(json.loads(line)["event"] for _, line in observed.lines if line.startswith("{"))
    assert set(events) <= {
        "metrics",
        "serving",
        "waiting",
        "model loaded",
        "engine",
        "request",
        "draining",
        "stopped",
        "engine lost",
    }
    assert not [line for _, line in observed.lines if not line.startswith("{")]
    stopped = observed.logged("stopped")
    assert {line["spans_exported"] for line in stopped} == {0}
    assert sum(line["spans_dropped"] for line in stopped) > 30


def test_an_engine_takes_little_beside_weights_and_kv(observed):
    """Interpreter, torch, gRPC, scratch and fragments: at most 400 MB, pages of files included, after requests."""
    with observed.client() as client:
        for _ in range(3):
            client.generate("Once upon a time", temperature=0, max_tokens=20, ignore_eos=True)
        stats = client.get_stats().engines[0].stats
    assert stats.resident_weight_bytes > 400e6  # float32
    assert 20 * 46_080 < stats.resident_kv_bytes < 1024 * 16 * 46_080
    assert 50e6 < stats.resident_file_bytes < stats.resident_bytes
    rest = stats.resident_bytes - stats.resident_weight_bytes - stats.resident_kv_bytes
    assert 100e6 < rest < 400e6


def test_what_an_engine_computes_in_is_told(observed):
    """Number format of weights and KV, and what weights are kept as, with the model and with its engines."""
    with observed.client() as client:
        (model,), (engine,) = client.list_models(), client.get_stats().engines
    told = [(one.dtype, one.quantization, one.kv_cache_dtype) for one in (model, engine)]
    assert told == [("float32", "none", "float32")] * 2
