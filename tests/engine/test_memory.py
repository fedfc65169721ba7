"""The memory ledger says what is known, and 0 where nothing is."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from headrace.v1 import generation_pb2
from services.engine.facts import facts_of
from services.engine.memory import ResidentMemory, heap_facts, touched_bytes
from services.engine.warm_up import ActivationMeter
from tests.engine.factories import make_engine, make_request, tiny_config, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_config())


def test_tensors_that_live_together_are_counted() -> None:
    """Two of 4,000 bytes at once, a third after one is gone; views and what was there before cost nothing."""
    before = torch.ones(1000)
    with ActivationMeter() as meter:
        first = before * 2
        view = first[:10]
        second = first + before
        before.add_(1)
        del first, view
        third = second * 2
    assert meter.peak_bytes == 8000
    assert third.sum() == 6000


def test_the_warm_up_measures_the_largest_step(model: Path) -> None:
    """More tokens a step need more; the widest tensor is a lower bound; without a warm-up nothing is claimed."""
    peaks = []
    for budget in (64, 256):
        engine = make_engine(model, max_num_batched_tokens=budget)
        assert engine.memory.peak_activation_bytes == 0
        engine.warm_up()
        peaks.append(engine.memory.peak_activation_bytes)
    assert peaks[0] > 64 * 160 * 4
    assert peaks[1] > 2 * peaks[0]


def test_waste_is_what_running_requests_have_reserved_and_not_used(model: Path) -> None:
    """A prompt of 20 tokens holds two blocks of 16: 12 places are waste, one fewer with each token."""
    engine = make_engine(model)
    engine.add(make_request(prompt=range(20), max_tokens=5))
    engine.step()
    assert engine.stats().kv_wasted_token_count == 11
    engine.step()
    assert engine.stats().kv_wasted_token_count == 10
    while engine.has_work:
        engine.step()
    assert engine.stats().kv_wasted_token_count == 0


def test_the_heap_grows_by_what_is_taken() -> None:
    """Where the C library tells, 64 MB more are seen as 64 MB more; in use is never more than reserved."""
    before = heap_facts()
    held = torch.ones(16 << 20)
    after = heap_facts()
    assert after.allocated_bytes <= after.reserved_bytes
    assert after.largest_free_bytes == 0
    if before.reserved_bytes:
        assert after.allocated_bytes - before.allocated_bytes >= held.nbytes


def test_a_pool_counts_as_far_as_it_is_touched() -> None:
    """Of 8 MB the two that were written, of a part the page of it; of nothing nothing."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[: 2 << 20] = b"1" * (2 << 20)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    assert touched_bytes(address, 8 << 20) == 2 << 20
    assert touched_bytes(address + 100, 1) == page
    assert touched_bytes(address + (4 << 20), 4 << 20) == 0


def test_an_engine_says_what_of_it_is_resident(model: Path, tmp_path: Path) -> None:
    """Weights, the touched part of the pool, and what the kernel says; 0 where it says nothing."""
    engine = make_engine(model)
    resident = engine.resident()
    assert resident.weight_bytes == engine.memory.weight_bytes
    assert 0 < resident.kv_bytes <= engine.memory.kv_bytes + 2 * mmap.PAGESIZE * len(engine._runner.kv)
    assert 0 < resident.file_bytes < resident.total_bytes
    assert ResidentMemory.measure(0, [], proc=tmp_path) == ResidentMemory()


def test_get_engine_tells_the_ledger(model: Path) -> None:
    """Every number of it, and the formula."""
    engine = make_engine(model)
    engine.warm_up()
    ledger = facts_of(engine, "tiny", generation_pb2.SamplingParameters()).memory
    assert ledger.kv_formula == "2 x 2 layers x 2 kv heads x 16 x 4 bytes = 512 bytes a token"
    assert ledger.peak_activation_bytes == engine.memory.peak_activation_bytes > 0
    assert ledger.weight_bytes == engine.memory.weight_bytes
    assert ledger.kv_bytes == 512 * 16 * 65
    assert ledger.allocator_reserved_bytes >= ledger.allocator_allocated_bytes
    assert ledger.allocator_largest_free_bytes == 0
