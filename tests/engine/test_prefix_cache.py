"""Guarantees of the prefix cache: never the last token, never past a hole, never on a hash alone."""

from __future__ import annotations

import numpy as np
import pytest

from services.engine.block_pool import BlockPool
from services.engine.prefix_cache import PrefixCache, block_name, root_name
from tests.engine.factories import SymbolicEngine, make_request


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 64])
def test_every_length_is_answered_the_same_cold_and_cached(chunk: int) -> None:
    """Prompts of 1 to 70 tokens, twice: floor((length - 1) / 16) blocks are hit, and the answer is the same."""
    for length in range(1, 71):
        engine = SymbolicEngine(block_size=16, max_num_batched_tokens=64, max_chunk_tokens=chunk)
        prompt = [(7 * i + length) % 50 for i in range(length)]
        cold = engine.add(make_request(1, prompt=prompt, max_tokens=3))
        engine.run()
        warm = engine.add(make_request(2, prompt=prompt, max_tokens=3))
        engine.run()
        longer = engine.add(make_request(3, prompt=[*prompt, *cold.output_ids.tolist()], max_tokens=3))
        engine.run()
        assert cold.clock.cached_token_count == 0
        assert warm.clock.cached_token_count == (length - 1) // 16 * 16
        assert longer.clock.cached_token_count == (length + 2) // 16 * 16
        for request in (cold, warm, longer):
            engine.check_answer(request)


def test_a_hit_stops_at_the_first_missing_block() -> None:
    """When the first block of a chain is gone, later blocks that are still there are not used."""
    engine = SymbolicEngine()
    request = engine.add(make_request(1, prompt=range(16), max_tokens=2))
    engine.run()
    fresh = make_request(2, prompt=range(16))
    blocks = engine.cache.find(fresh)
    assert len(blocks) == 3
    lost = block_name(root_name("", b""), np.arange(4, dtype=np.int32))
    del engine.pool._by_hash[lost]
    assert engine.cache.find(make_request(3, prompt=range(16))) == []
    assert request.output_count == 2


def test_tails_are_evicted_before_heads() -> None:
    """Pressure shortens a cached chain from its end."""
    engine = SymbolicEngine(block_count=8)
    engine.add(make_request(1, prompt=range(24), max_tokens=1))
    engine.run()
    assert len(engine.cache.find(make_request(2, prompt=range(24)))) == 5
    engine.pool.allocate(4)  # two empty blocks, then two cached ones
    assert len(engine.cache.find(make_request(3, prompt=range(24)))) == 4


def test_tokens_are_compared_on_a_hit() -> None:
    """A name that matches with other tokens is not believed."""
    pool = BlockPool(4)
    cache = PrefixCache(pool, 4)
    request = make_request(1, prompt=range(8))
    for block in pool.allocate(2):
        request.block_table.append(block)
    request.computed_count = 8
    cache.register(request, 0)
    assert len(cache.find(make_request(2, prompt=range(8)))) == 1
    cache._tokens[request.block_table[0], 0] = 49
    assert cache.find(make_request(3, prompt=range(8))) == []


def test_names_depend_on_every_extra_and_cannot_run_together() -> None:
    """Model and salt are told apart even when their bytes join to the same string."""
    assert root_name("ab", b"c") != root_name("a", b"bc")
    assert root_name("a", b"") != root_name("", b"a")
    ids = np.arange(4, dtype=np.int32)
    assert block_name(root_name("a", b""), ids) != block_name(root_name("b", b""), ids)
    assert block_name(b"x" * 32, ids) == block_name(b"x" * 32, ids.astype(np.int64))


def test_a_disabled_cache_finds_nothing() -> None:
    """Without the cache every prompt is computed whole."""
    engine = SymbolicEngine(prefix_cache=False)
    for request_id in (1, 2):
        request = engine.add(make_request(request_id, prompt=range(12)))
        engine.run()
        assert request.clock.cached_token_count == 0
    assert engine.pool.cached_count == 0
