"""The engine's thread: sleeps when idle, wakes for commands and deadlines, ends as it was told. No sleeps here."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.engine.engine import Engine
from services.engine.loop import EngineLoop
from services.engine.outputs import RequestOutput, StepFacts, StepOutput
from services.engine.request import FinishReason, RequestRefused
from tests.engine.factories import make_engine, make_request, write_scripted_model

WAIT_S = 20


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scripted_model(tmp_path_factory.mktemp("scripted"), {})


@dataclass
class Harness:
    """A running loop and what it said."""

    loop: EngineLoop
    engine: Engine
    outputs: queue.Queue[RequestOutput] = field(default_factory=queue.Queue)
    refusals: queue.Queue[tuple[int, RequestRefused]] = field(default_factory=queue.Queue)
    deaths: queue.Queue[BaseException] = field(default_factory=queue.Queue)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    facts: list[StepFacts] = field(default_factory=list)

    def until_finished(self, *request_ids: int) -> dict[int, FinishReason]:
        """Collect outputs until each of these requests has ended."""
        finished: dict[int, FinishReason] = {}
        while set(request_ids) - set(finished):
            self._take(finished)
        return finished

    def until_tokens(self, request_id: int, count: int) -> None:
        while len(self.tokens.get(request_id, [])) < count:
            self._take({})

    def _take(self, finished: dict[int, FinishReason]) -> None:
        output = self.outputs.get(timeout=WAIT_S)
        self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if output.finish is not None:
            finished[output.request_id] = output.finish


@contextmanager
def _running(path: Path, **changes: Any) -> Iterator[Harness]:
    engine = make_engine(path, **changes)

    def publish(output: StepOutput) -> None:
        if output.facts is not None:
            harness.facts.append(output.facts)
        for item in output.outputs:
            harness.outputs.put(item)

    deaths: queue.Queue[BaseException] = queue.Queue()
    loop = EngineLoop(
        engine,
        publish=publish,
        refused=lambda request_id, refusal: harness.refusals.put((request_id, refusal)),
        fatal=deaths.put,
    )
    harness = Harness(loop, engine, deaths=deaths)
    loop.start()
    try:
        yield harness
    finally:
        loop.stop(drain=False)
        assert loop.join(WAIT_S), "the loop did not end"


def test_requests_from_many_threads_are_answered(scripted: Path) -> None:
    """Every request gets its own tokens and one ending."""
    with _running(scripted) as harness:

        def submit(first: int) -> None:
            for i in range(first, first + 5):
                harness.loop.add(make_request(i, prompt=[i], max_tokens=4))

        threads = [threading.Thread(target=submit, args=(5 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        finished = harness.until_finished(*range(20))
        assert set(finished.values()) == {FinishReason.LENGTH}
        for i in range(20):
            assert harness.tokens[i] == [i + 1, i + 2, i + 3, i + 4]


def test_the_host_gap_is_told_while_there_is_work(scripted: Path) -> None:
    """Between the steps of an answer there is a gap, shorter than both steps with it; after idleness there is none."""
    with _running(scripted) as harness:
        for request_id in (1, 2):
            harness.loop.add(make_request(request_id, prompt=[10], max_tokens=4))
            harness.until_finished(request_id)
        for first, *others in (harness.facts[:4], harness.facts[4:]):
            assert first.host_gap_ns is None
            for before, after in itertools.pairwise((first, *others)):
                assert after.host_gap_ns is not None
                apart_ns = after.started_ns - before.started_ns
                assert 0 < after.host_gap_ns < apart_ns + after.step_ns
        assert len(harness.facts) == 8


def test_a_paused_request_sleeps_until_it_is_granted(scripted: Path) -> None:
    """While all are paused no step runs; a grant wakes the loop."""
    with _running(scripted) as harness:
        harness.loop.add(make_request(1, prompt=[10], max_tokens=6, credit_limit=2))
        harness.until_tokens(1, 2)
        steps = harness.loop.call(lambda engine: engine.stats().step_count).result(WAIT_S)
        assert harness.loop.call(lambda engine: engine.runnable).result(WAIT_S) is False
        assert harness.loop.call(lambda engine: engine.stats().step_count).result(WAIT_S) == steps
        harness.loop.grant(1, 10)
        assert harness.until_finished(1) == {1: FinishReason.LENGTH}
        assert harness.tokens[1] == [11, 12, 13, 14, 15, 16]


def test_an_idle_loop_uses_no_processor(scripted: Path) -> None:
    """Waiting for a deadline, the process burns next to nothing; then the paused request ends."""
    with _running(scripted) as harness:
        deadline_ns = time.monotonic_ns() + 300_000_000
        harness.loop.add(make_request(1, max_tokens=50, credit_limit=1, deadline_ns=deadline_ns))
        harness.until_tokens(1, 1)
        before = time.process_time()
        assert harness.until_finished(1) == {1: FinishReason.DEADLINE_EXCEEDED}
        assert time.process_time() - before < 0.15
        assert time.monotonic_ns() >= deadline_ns


def test_aborts_reach_running_paused_and_unknown_requests(scripted: Path) -> None:
    """One CANCELLED each; unknown and late ids do nothing."""
    with _running(scripted) as harness:
        harness.loop.add(make_request(1, max_tokens=400))
        harness.loop.add(make_request(2, max_tokens=400, credit_limit=1))
        harness.until_tokens(1, 1)
        for request_id in (1, 2, 99, 1):
            harness.loop.abort(request_id)
        assert set(harness.until_finished(1, 2).values()) == {FinishReason.CANCELLED}
        stats = harness.loop.call(Engine.stats).result(WAIT_S)
        assert stats.kv_block_free + stats.kv_block_cached == stats.kv_block_total


def test_a_refusal_is_reported_and_the_loop_goes_on(scripted: Path) -> None:
    """The empty prompt is refused by callback; the next request is answered."""
    with _running(scripted) as harness:
        harness.loop.add(make_request(1, prompt=[]))
        harness.loop.add(make_request(2, prompt=[3], max_tokens=1))
        request_id, refusal = harness.refusals.get(timeout=WAIT_S)
        assert (request_id, refusal.reason) == (1, "EMPTY_PROMPT")
        assert harness.until_finished(2) == {2: FinishReason.LENGTH}


def test_a_failing_call_is_the_callers_error(scripted: Path) -> None:
    """Its exception is in the future; the loop goes on."""
    with _running(scripted) as harness:
        failing = harness.loop.call(lambda engine: 1 // engine.stats().step_count)
        with pytest.raises(ZeroDivisionError):
            failing.result(WAIT_S)
        assert harness.loop.call(lambda engine: engine.has_work).result(WAIT_S) is False


def test_a_drain_lets_requests_finish_and_refuses_new_ones(scripted: Path) -> None:
    """After stop(drain=True) running requests end by themselves, then the thread ends."""
    with _running(scripted) as harness:
        harness.loop.add(make_request(1, prompt=[3], max_tokens=100))
        harness.until_tokens(1, 1)
        harness.loop.stop(drain=True)
        harness.loop.add(make_request(2))
        assert harness.until_finished(1) == {1: FinishReason.LENGTH}
        request_id, refusal = harness.refusals.get(timeout=WAIT_S)
        assert (request_id, refusal.reason) == (2, "SHUTTING_DOWN")
        assert harness.loop.join(WAIT_S)
        harness.loop.add(make_request(3))
        assert harness.refusals.get(timeout=WAIT_S)[0] == 3
        with pytest.raises(RuntimeError, match="ended"):
            harness.loop.call(Engine.stats).result(WAIT_S)
        assert harness.deaths.empty()


def test_a_second_stop_cuts_a_drain_short(scripted: Path) -> None:
    """A paused request would hold the drain for ever; stop(drain=False) ends it as CANCELLED."""
    with _running(scripted) as harness:
        harness.loop.add(make_request(1, max_tokens=100, credit_limit=1))
        harness.until_tokens(1, 1)
        harness.loop.stop(drain=True)
        assert not harness.loop.join(0.05)
        harness.loop.stop(drain=False)
        assert harness.until_finished(1) == {1: FinishReason.CANCELLED}
        assert harness.loop.join(WAIT_S)


def test_a_dying_loop_says_why_and_leaves_nobody_waiting(scripted: Path) -> None:
    """An exception that is no request's fault goes to ``fatal``, once; calls fail; later ones too."""
    with _running(scripted) as harness:

        def broken(_after: Any) -> Any:
            raise MemoryError("no more")

        harness.loop.call(lambda engine: setattr(engine._scheduler, "schedule", broken)).result(WAIT_S)
        harness.loop.add(make_request(1))
        assert isinstance(harness.deaths.get(timeout=WAIT_S), MemoryError)
        assert harness.loop.join(WAIT_S)
        with pytest.raises(RuntimeError):
            harness.loop.call(Engine.stats).result(WAIT_S)
        assert harness.deaths.empty()


def test_a_held_loop_computes_nothing(scripted: Path) -> None:
    """While it is held commands are taken and no step is; what waited then goes on, and a stop does not wait."""
    with _running(scripted) as harness:
        harness.loop.pause()
        harness.loop.add(make_request(1, prompt=[10], max_tokens=4))
        assert harness.loop.call(lambda engine: engine.has_work).result(WAIT_S) is True
        assert harness.loop.call(lambda engine: engine.stats().decoded_token_count).result(WAIT_S) == 0
        harness.loop.resume()
        assert harness.until_finished(1) == {1: FinishReason.LENGTH}
        harness.loop.pause()
        harness.loop.add(make_request(2, prompt=[10], max_tokens=4))
        assert harness.loop.call(lambda engine: engine.has_work).result(WAIT_S) is True
        harness.loop.stop(drain=True)
        assert harness.until_finished(2) == {2: FinishReason.LENGTH}
