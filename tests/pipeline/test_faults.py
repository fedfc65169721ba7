"""Processes and connections are killed again and again while resumable streams run: no text is lost, none doubled."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading

import pytest

from headrace import Client
from headrace.cli.pipeline import wait_serving
from tests.pipeline.conftest import start_pipeline, until
from tests.pipeline.tcp_proxy import TcpProxy

STREAMS = 8
TOKENS = 200
KILLS = 10


def request(number):
    sampling = {"temperature": 0} if number % 2 else {"temperature": 1.0, "top_p": 0.95, "seed": number}
    return {
        "prompt": f"Story number {number}: once upon a time",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "include_token_ids": True,
        **sampling,
    }


class Reader(threading.Thread):
    """Reads one resumable stream to its end."""

    def __init__(self, client, number):
        super().__init__(daemon=True)
        self._client, self._number = client, number
        self.text, self.token_ids, self.numbers = "", [], []
        self.answer = None
        self.error: BaseException | None = None
        self.resume_count = 0

    def run(self):
        try:
            stream = self._client.stream(resumable=True, resume_timeout=60, **request(self._number))
            for delta in stream:
                self.text += delta.text
                self.token_ids += delta.token_ids
                self.numbers.append(delta.sequence_number)
            self.answer, self.resume_count = stream.answer, stream.resume_count
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.error = error


class Faults:
    """Kills and restarts one process of a pipeline, or cuts its connections."""

    def __init__(self, pipeline, proxy):
        self._pipeline, self._proxy = pipeline, proxy
        self._children: dict[str, subprocess.Popen] = {}

    def strike(self, victim):
        if victim == "connection":
            assert self._proxy.cut() >= 0
            return
        child = self._children.get(victim)
        os.kill(child.pid if child else self._pipeline.supervisor.pids[victim], signal.SIGKILL)
        if child:
            child.wait()
        program = next(p for p in self._pipeline.plan.programs if p.name == victim)
        self._children[victim] = subprocess.Popen(program.command, env=dict(program.environ), stderr=subprocess.DEVNULL)

    def end(self):
        for child in self._children.values():
            child.terminate()
        for child in self._children.values():
            child.wait(15)


@pytest.fixture(scope="module")
def undisturbed(pipeline):
    """Each stream's ids and text when nothing happens."""
    with pipeline.client() as client:
        readers = [Reader(client, number) for number in range(STREAMS)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(120)
    assert [reader.error for reader in readers] == [None] * STREAMS
    return [(reader.token_ids, reader.text) for reader in readers]


@pytest.mark.parametrize("victim", ["connection", "gateway", "stream", "engine"])
def test_every_stream_ends_as_if_nothing_had_happened(undisturbed, default_model_dir, receiver, redis_server, victim):
    """Ten kills at random points: every id and every character of each stream, once, in order."""
    choice = random.Random(victim)
    with start_pipeline(receiver, REDIS_URL=redis_server.url) as pipeline:
        proxy = TcpProxy(pipeline.target)
        faults = Faults(pipeline, proxy)
        try:
            with Client(proxy.address) as client:
                readers = [Reader(client, number) for number in range(STREAMS)]
                for reader in readers:
                    reader.start()
                for _ in range(KILLS):
                    seen = sum(len(reader.token_ids) for reader in readers)
                    wanted = min(seen + choice.randint(1, 15 * STREAMS), STREAMS * TOKENS)
                    until(lambda: sum(len(r.token_ids) for r in readers) >= wanted, 90, "progress")  # noqa: B023
                    faults.strike(victim)
                for reader in readers:
                    reader.join(120)
            assert [reader.error for reader in readers] == [None] * STREAMS
            for reader, (token_ids, text) in zip(readers, undisturbed, strict=True):
                assert reader.numbers == list(range(len(reader.numbers)))
                assert reader.token_ids == token_ids
                assert reader.text == text
                assert reader.answer.usage.completion_token_count == TOKENS
            assert victim == "engine" or any(reader.resume_count for reader in readers)
            wait_serving(pipeline.supervisor, pipeline.target)
            until(lambda: pipeline.baseline()[:5] == (0, 0, 0, 0, 0), 10, "the baseline")
        finally:
            faults.end()
            proxy.close()
