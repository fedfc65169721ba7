"""kill -9 of any one process while streams run: every caller gets a status within 2 s, none hangs."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from headrace import errors
from headrace.cli.supervisor import ProgramDied
from tests.pipeline.conftest import PROCESSES, until

STREAMS = 8


class Reader(threading.Thread):
    """Reads one stream to its end, whatever that is."""

    def __init__(self, client, number):
        super().__init__(daemon=True)
        self._client, self._number = client, number
        self.first = threading.Event()
        self.outcome: object = None
        self.ended_at = 0.0

    def run(self):
        prompt = [1000 + self._number, 2000, 3000]
        try:
            for _ in self._client.stream(token_ids=prompt, max_tokens=4000, ignore_eos=True):
                self.first.set()
            self.outcome = "ended"
        except errors.HeadraceError as error:
            self.outcome = error
        self.ended_at = time.monotonic()


@pytest.mark.parametrize("victim", PROCESSES)
def test_every_caller_gets_a_status(own_pipeline, victim):
    """Killed gateway, stream process or engine: UNAVAILABLE. Killed tokenizer: running streams need it no more."""
    with own_pipeline.client() as client:
        readers = [Reader(client, number) for number in range(STREAMS)]
        for reader in readers:
            reader.start()
        for reader in readers:
            assert reader.first.wait(30)
        os.kill(own_pipeline.supervisor.pids[victim], signal.SIGKILL)
        killed_at = time.monotonic()
        with pytest.raises(ProgramDied) as died:
            own_pipeline.supervisor.wait(10)
        assert victim in str(died.value)
        assert "SIGKILL" in str(died.value)
        if victim == "tokenizer":  # as `headrace up` does: one died, so all stop
            own_pipeline.supervisor.stop(at_once=True)
        for reader in readers:
            reader.join(10)
    assert [reader for reader in readers if reader.is_alive()] == []
    assert max(reader.ended_at for reader in readers) - killed_at < 2
    assert [reader.outcome for reader in readers if not isinstance(reader.outcome, errors.Unavailable)] == []


def test_an_engine_that_comes_back_is_used_again(own_pipeline):
    """The gateway refuses while its engine is gone, and serves again, without a restart, once it is back."""
    import subprocess

    wanted = {"prompt": "The sky is", "temperature": 0, "max_tokens": 5}
    program = next(p for p in own_pipeline.plan.programs if p.name == "engine")
    with own_pipeline.client() as client:
        before = client.generate(**wanted).text
        os.kill(own_pipeline.supervisor.pids["engine"], signal.SIGKILL)
        until(lambda: not client.get_stats().engines[0].reachable, 10, "the loss")
        with pytest.raises(errors.Unavailable):
            client.generate(**wanted)
        again = subprocess.Popen(program.command, env=dict(program.environ), stderr=subprocess.DEVNULL)
        try:

            def answers():
                try:
                    return client.generate(**wanted).text == before
                except errors.Unavailable:
                    return False

            until(answers, 60, "the engine's return")
        finally:
            again.terminate()
            again.wait(10)
