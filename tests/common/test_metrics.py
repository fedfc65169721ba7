"""Metrics are named once, cost next to nothing, are bounded, and are scraped with exemplars."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace.cli import ports
from services.common import machine, metric_names
from services.common.metrics import MAX_LABEL_SETS, OTHER, Metrics


def scrape(port: int) -> dict[str, list]:
    """Samples by series name."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(request, timeout=5) as answer:
        text = answer.read().decode()
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def test_names_are_unique_and_follow_prometheus():
    """No two metrics share a name in either spelling; units are in the name."""
    assert len({metric.name for metric in metric_names.ALL}) == len(metric_names.ALL)
    series = [name for metric in metric_names.ALL for name in metric.series]
    assert len(set(series)) == len(series)
    for metric in metric_names.ALL:
        assert metric.meaning
        assert (metric.unit == metric_names.SECONDS) == metric.prometheus.endswith("_seconds")
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(metric.buckets)


def test_standard_names_come_first():
    """What the semantic conventions name is named so."""
    assert metric_names.TIME_TO_FIRST_TOKEN.series[0] == "gen_ai_server_time_to_first_token_seconds_bucket"
    assert metric_names.TIME_PER_OUTPUT_TOKEN.series[1] == "gen_ai_server_time_per_output_token_seconds_sum"
    assert metric_names.REQUEST_DURATION.series[2] == "gen_ai_server_request_duration_seconds_count"
    assert metric_names.CALL_DURATION.prometheus == "rpc_server_call_duration_seconds"


async def test_the_endpoint_gives_what_was_counted_with_exemplars():
    """Counters, gauges, histograms and totals, over HTTP in OpenMetrics; a bucket names a trace."""
    metrics = Metrics()
    metrics.add(metric_names.REQUESTS, 2, "Generate", "stop")
    metrics.set(metric_names.REQUESTS_OPEN, 3)
    metrics.observe(metric_names.TIME_TO_FIRST_TOKEN, 0.03, "chat", "m", "<=128", trace_id="ab" * 16)
    metrics.observe_many(metric_names.INTER_TOKEN, [0.02, 0.02, 9.0], "<=128")
    for total in (5, 7, 1):  # the process that counted began anew
        metrics.total(metric_names.PREEMPTIONS, total)
    (port,) = ports.free("127.0.0.1", 1)
    metrics.start("127.0.0.1", port, asyncio.get_running_loop())
    try:
        metrics.sample()
        found = await asyncio.to_thread(scrape, port)
    finally:
        metrics.close()
    assert found["headrace_requests_total"][0].value == 2
    assert found["headrace_requests_total"][0].labels == {"method": "Generate", "outcome": "stop"}
    assert found["headrace_requests_open"][0].value == 3
    assert found["headrace_preemptions_total"][0].value == 8
    exemplars = [s.exemplar for s in found["gen_ai_server_time_to_first_token_seconds_bucket"] if s.exemplar]
    assert [e.labels for e in exemplars] == [{"trace_id": "ab" * 16}]
    gaps = {s.labels["le"]: s.value for s in found["headrace_inter_token_duration_seconds_bucket"]}
    assert (gaps["0.01"], gaps["0.02"], gaps["5.12"], gaps["+Inf"]) == (0, 2, 2, 3)
    assert found["headrace_inter_token_duration_seconds_sum"][0].value == pytest.approx(9.04)
    assert found["process_memory_usage_bytes"][0].value > 1e6
    assert {s.labels["cpu_mode"] for s in found["process_cpu_time_seconds_total"]} == {"user", "system"}


async def test_a_port_in_use_is_an_error():
    """The endpoint does not share a port in silence."""
    (port,) = ports.free("127.0.0.1", 1)
    first, second = Metrics(), Metrics()
    first.start("127.0.0.1", port, asyncio.get_running_loop())
    try:
        with pytest.raises(OSError, match="in use"):
            second.start("127.0.0.1", port, asyncio.get_running_loop())
    finally:
        first.close()
        second.close()


def test_label_sets_are_bounded():
    """A label that turns out to have many values cannot fill the memory."""
    metrics = Metrics()
    for number in range(MAX_LABEL_SETS + 50):
        metrics.add(metric_names.TOKENS, 1, f"tenant-{number}", "Generate", "prompt")
    family = metrics._families[metric_names.TOKENS.name]
    samples = [sample for metric in family.collect() for sample in metric.samples if sample.name.endswith("_total")]
    assert len(samples) == MAX_LABEL_SETS + 1
    assert next(s.value for s in samples if s.labels["tenant"] == OTHER) == 50


def test_recording_costs_microseconds():
    """Twenty observations a request are nothing: far under 100 µs each, whatever the machine."""
    metrics = Metrics()
    began = time.perf_counter()
    for _ in range(1000):
        metrics.observe(metric_names.STAGE_DURATION, 0.01, "prefill")
    assert (time.perf_counter() - began) / 1000 < 100e-6


def test_length_buckets():
    """Bounds belong to the lower bucket."""
    assert [metric_names.length_bucket(n) for n in (1, 128, 129, 9000)] == ["<=128", "<=128", "<=512", ">8192"]


def test_what_linux_does_not_tell_is_left_out(tmp_path: Path):
    """A machine without pressure files has no pressure metric, and nothing fails."""
    metrics = Metrics()
    machine.sample(metrics, tmp_path)
    assert set(metrics._families) == {metric_names.CPU_TIME.name}
    text = "some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
    assert machine.pressure(text) == 0.125
