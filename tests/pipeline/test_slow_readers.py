"""Readers that sleep cost nothing but their KV: their generation stops at the bound, everybody else goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.pipeline.conftest import until

SLEEPERS = 10
WINDOW = 64
TOKENS = 1000
# What one hop's small window may swallow beyond the credits (architecture: about 44 messages of 4 to 8 tokens).
HOP_TOKENS = 44 * 8
RSS_GROWTH_BYTES = 60 << 20


def wanted(number, **fields):
    prompt = [5000 + number, 6000, 7000]
    return {"token_ids": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **fields}


def rss_bytes(pipeline):
    return {
        name: int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * 4096
        for name, pid in pipeline.supervisor.pids.items()
    }


@pytest.mark.parametrize("exact", [True, False], ids=["session", "plain"])
def test_ten_sleepers_beside_one_reader(tiny_pipeline, exact):
    """Tokens for sleepers stop at the bound, the reader is served; awake, nothing is missing or doubled."""
    pipeline = tiny_pipeline
    options = {"window": WINDOW} if exact else {}
    most = WINDOW if exact else WINDOW + HOP_TOKENS
    with pipeline.client() as client, pipeline.client() as sleepers:
        whole = client.generate(**wanted(0)).text
        before, memory = pipeline.engine_state().stats.decoded_token_count, rss_bytes(pipeline)
        streams = [sleepers.stream(**wanted(0, **options)) for _ in range(SLEEPERS)]
        firsts = [next(stream) for stream in streams]
        until(lambda: pipeline.engine_state().stats.paused_count == SLEEPERS, 60, "the pause of all sleepers")
        generated = pipeline.engine_state().stats.decoded_token_count - before
        assert generated <= SLEEPERS * (most + firsts[0].token_count)

        reader = client.generate(**wanted(1, max_tokens=50))
        assert reader.usage.completion_token_count == 50
        assert pipeline.engine_state().stats.decoded_token_count == before + generated + 50
        growth = {name: after - memory[name] for name, after in rss_bytes(pipeline).items()}
        assert max(growth.values()) < RSS_GROWTH_BYTES, growth

        texts = [""] * SLEEPERS

        def wake(number):
            texts[number] = firsts[number].text + "".join(delta.text for delta in streams[number])

        threads = [threading.Thread(target=wake, args=(number,)) for number in range(SLEEPERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == [whole] * SLEEPERS
    assert all(stream.answer.timings.paused_ns > 0 for stream in streams)
