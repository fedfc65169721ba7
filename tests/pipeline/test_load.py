"""Many at once: every answer is the one that was given alone, and afterwards nothing is left behind."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace import errors
from headrace.bench.workloads import w1
from tests.pipeline.conftest import until


def ask(client, request):
    stream = client.stream(
        token_ids=request.prompt, max_tokens=request.output, temperature=0, ignore_eos=True, include_token_ids=True
    )
    deltas = list(stream)
    assert sum(delta.token_count for delta in deltas) == stream.answer.usage.completion_token_count == request.output
    assert [delta.sequence_number for delta in deltas] == list(range(len(deltas)))
    assert "".join(delta.text for delta in deltas) == stream.answer.text
    return stream.answer.text, tuple(token for delta in deltas for token in delta.token_ids)


def test_32_clients_get_the_answers_they_get_alone(pipeline):
    """32 clients on W1's lengths: ids and text equal to those asked alone; the engine is as it was."""
    requests = [chain[0] for chain in w1()[:32]]
    before = pipeline.baseline()
    pipeline.flush_prefix_cache()
    with pipeline.client() as client, ThreadPoolExecutor(32) as pool:
        together = list(pool.map(lambda request: ask(client, request), requests))
        pipeline.flush_prefix_cache()
        alone = [ask(client, request) for request in requests]
    assert together == alone
    until(lambda: pipeline.baseline() == before, 2, "the baseline")


@pytest.mark.parametrize("round_number", range(5))
def test_cancels_at_random_points_leave_nothing(pipeline, round_number):
    """20 cancels while queued, in prefill, in decode, at the end: within 2 s everything is as before."""
    before = pipeline.baseline()
    choice = random.Random(round_number)
    prompts = [[choice.randint(1000, 40000) for _ in range(choice.choice((5, 60, 700)))] for _ in range(20)]
    reads = [choice.choice((0, 0, 1, 1, 2, 5)) for _ in prompts]

    def cancel(client, prompt, read):
        with client.stream(token_ids=prompt, max_tokens=2000, ignore_eos=True) as stream:
            for _ in range(read):
                next(stream)

    with pipeline.client() as client, ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda pair: cancel(client, *pair), zip(prompts, reads, strict=True)))
    until(lambda: pipeline.baseline() == before, 2, "the baseline")


def test_deadlines_end_the_work(pipeline):
    """Queued or running: DEADLINE_EXCEEDED for the caller, what was sent stays valid, nothing runs on."""
    before = pipeline.baseline()
    with pipeline.client() as client:
        with pytest.raises(errors.DeadlineExceeded):
            client.generate("Hi", max_tokens=2000, ignore_eos=True, timeout=0.3)
        with pytest.raises(errors.DeadlineExceeded):
            client.generate("Hi", max_tokens=2000, timeout=0.001)
        got: list[str] = []
        stream = client.stream("Hi", temperature=0, max_tokens=2000, ignore_eos=True, timeout=0.6)
        with pytest.raises(errors.DeadlineExceeded):
            got.extend(delta.text for delta in stream)
        whole = client.generate("Hi", temperature=0, max_tokens=200, ignore_eos=True).text
    assert got
    assert whole.startswith("".join(got))
    until(lambda: pipeline.baseline() == before, 1, "the baseline")


def test_an_expired_request_is_never_prefilled(pipeline):
    """A deadline that passes before the engine's turn costs no prefill."""
    prefilled = pipeline.engine_state().stats.prefilled_token_count
    with pipeline.client() as client:
        for _ in range(20):
            with pytest.raises(errors.DeadlineExceeded):
                client.generate(token_ids=[5000] * 700, timeout=0.0005)
    assert pipeline.engine_state().stats.prefilled_token_count <= prefilled + 700


def test_a_reader_that_stops_is_paused_not_fed(pipeline):
    """With our client, an unread stream's generation stops at its window; others go on; it resumes where it was."""
    wanted = {"token_ids": [1, 9690, 198], "temperature": 0, "max_tokens": 400, "ignore_eos": True}
    with pipeline.client() as client, pipeline.client() as other:
        whole = other.generate(**wanted).text
        stream = client.stream(**wanted)
        first = next(stream)
        until(lambda: pipeline.engine_state().stats.paused_count == 1, 10, "the pause")
        decoded = pipeline.engine_state().stats.decoded_token_count
        quick = other.generate("Hi", max_tokens=8, temperature=0, ignore_eos=True)
        assert quick.usage.completion_token_count == 8
        assert pipeline.engine_state().stats.decoded_token_count == decoded + 8
        rest = "".join(delta.text for delta in stream)
        assert first.text + rest == whole
        assert stream.answer.timings.paused_ns > 0
