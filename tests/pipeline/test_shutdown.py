"""SIGTERM: new calls are refused, streams finish within the grace period, each gets its exact status, exit code 0."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace import errors
from tests.pipeline.conftest import start_pipeline, until


class Reader(threading.Thread):
    def __init__(self, client, max_tokens):
        super().__init__(daemon=True)
        self._client, self._max_tokens = client, max_tokens
        self.first, self.text, self.outcome = threading.Event(), "", None

    def run(self):
        try:
            stream = self._client.stream("Hi", max_tokens=self._max_tokens, temperature=0, ignore_eos=True)
            for delta in stream:
                self.text += delta.text
                self.first.set()
            self.outcome = "ok"
        except errors.HeadraceError as error:
            self.outcome = error.reason


@pytest.fixture
def draining_pipeline(default_model_dir, receiver):
    with start_pipeline(receiver, GATEWAY_GRACE_S="3") as pipeline:
        yield pipeline


def test_short_streams_finish_and_long_ones_end_unavailable(draining_pipeline):
    """2 short streams end OK; 3 long ones UNAVAILABLE (SHUTTING_DOWN) with what they had; then exit code 0."""
    pipeline = draining_pipeline
    child = pipeline.supervisor.pids["gateway"]
    with pipeline.client() as client:
        readers = [Reader(client, count) for count in (40, 40, 8000, 8000, 8000)]
        for reader in readers:
            reader.start()
        for reader in readers:
            assert reader.first.wait(30)
        os.kill(child, signal.SIGTERM)

        def refused():
            try:
                client.generate("Hi", max_tokens=1)
            except errors.Unavailable as error:
                return error.reason == "SHUTTING_DOWN"
            return False

        until(refused, 2, "the refusal of new calls")
        for reader in readers:
            reader.join(8)
    assert [reader.outcome for reader in readers] == ["ok", "ok"] + ["SHUTTING_DOWN"] * 3
    assert all(reader.text for reader in readers)
    until(lambda: _gone(child), 5, "the gateway's end")
    assert any("stopped" in line for line in pipeline.supervisor.lines("gateway"))
    assert not any("Traceback" in line or "destroyed" in line for line in pipeline.supervisor.lines("gateway"))


def _gone(pid):
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("process", ["gateway", "tokenizer", "stream", "engine"])
def test_every_process_answers_health(pipeline, process):
    """grpc.health.v1 with Watch on each of the four."""
    with grpc.insecure_channel(pipeline.plan.addresses[process]) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


def test_serving_means_that_a_call_succeeds(default_model_dir, receiver):
    """From the first moment of SERVING on, no call fails: 64 identical prompts in the first instant."""
    from concurrent.futures import ThreadPoolExecutor

    with start_pipeline(receiver) as pipeline, pipeline.client() as client, ThreadPoolExecutor(64) as pool:
        prompt = list(range(2000, 2120))
        ask = lambda _: client.generate(token_ids=prompt, temperature=0, max_tokens=4).text  # noqa: E731
        answers = set(pool.map(ask, range(64)))
        assert len(answers) == 1
        stats = pipeline.engine_state().stats
    assert stats.kv_free_block_count + stats.kv_cached_block_count == stats.kv_total_block_count
