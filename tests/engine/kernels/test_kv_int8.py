"""Keys and values as bytes: what a row keeps, what kernels make of it, and an engine with such a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.v1 import generation_pb2
from services.engine.facts import facts_of
from services.engine.kernels import CpuKernels, DeterministicKernels, Kernels, ReferenceKernels
from services.engine.kernels.kv_int8 import from_rows, row_width, to_rows
from tests.engine.factories import finish_all, make_engine, make_request, tiny_config, write_model
from tests.engine.kernels.plans import make_plan, written_pool

INT8 = torch.int8
DIM = 16
PROMPT = [(11 * i * i + 3 * i) % 97 for i in range(53)]


def test_a_row_is_codes_and_their_scale() -> None:
    """Each number within half a step of its row's scale, the largest exact; zeros stay zeros."""
    torch.manual_seed(1)
    x = torch.randn(5, 2, 3, DIM) * torch.logspace(-6, 6, 5)[:, None, None, None]
    x[1, 0, 0] = 0
    rows = to_rows(x, INT8)
    assert (rows.dtype, rows.shape[-1]) == (INT8, row_width(DIM, INT8))
    found, largest = from_rows(rows, torch.float32), x.abs().amax(-1, keepdim=True)
    assert ((found - x).abs() <= 0.501 * largest / 127).all()
    torch.testing.assert_close(found.abs().amax(-1, keepdim=True), largest)
    assert not found[1, 0, 0].any()
    assert to_rows(x, torch.float32) is from_rows(x, torch.float32) is x


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so_and_alone(value: float) -> None:
    """A row never becomes numbers that look like an answer, and spoils no other."""
    x = torch.randn(4, DIM)
    clean, x[2, 3] = from_rows(to_rows(x, INT8), torch.float32), value
    found = from_rows(to_rows(x, INT8), torch.float32)
    assert not found[2].isfinite().all()
    others = [0, 1, 3]
    assert found[others].equal(clean[others])


@pytest.mark.parametrize("kernels", [ReferenceKernels(), CpuKernels(), DeterministicKernels()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "block_size"), [(2, 2, 8), (6, 2, 16), (7, 1, 32), (8, 1, 16)])
def test_attention_is_that_over_the_numbers_of_the_rows(
    kernels: Kernels, heads: int, kv_heads: int, block_size: int, dtype: torch.dtype
) -> None:
    """Decode, chunks, odd lengths; slots that nobody wrote have NaN for a scale."""
    generator = torch.Generator().manual_seed(3)
    plan, blocks = make_plan([(5, 1), (300, 1), (33, 1), (16, 16), (51, 7)], block_size)
    kv = written_pool(plan, blocks, kv_heads, DIM, INT8, generator)
    q = torch.randn((plan.token_count, heads, DIM), generator=generator).to(dtype)
    found = kernels.attention(q, kv, kernels.prepare(plan, dtype))
    plain, numbers = ReferenceKernels(), from_rows(kv, torch.float32)
    expected = plain.attention(q.float(), numbers, plain.prepare(plan, torch.float32))
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kernels", [ReferenceKernels(), CpuKernels(), DeterministicKernels()])
def test_what_is_stored_is_the_turned_keys_and_the_values(kernels: Kernels) -> None:
    """In their slots and in no other."""
    torch.manual_seed(4)
    qkv, slots = torch.randn(3, 7, DIM), torch.tensor([9, 3, 22])
    angle = torch.rand(3, 1, DIM // 2)
    cos, sin = angle.cos().repeat(1, 1, 2), torch.cat([-angle.sin(), angle.sin()], -1)
    kv, expected = torch.full((3, 8, 2, 2, row_width(DIM, INT8)), -1, dtype=INT8), torch.zeros(3, 8, 2, 2, DIM)
    ReferenceKernels().rotate_and_store(qkv.clone(), cos, sin, expected, slots)
    kernels.rotate_and_store(qkv, cos, sin, kv, slots)
    written = kv.view(24, 2, 2, -1)[slots]
    found, wanted = from_rows(written, torch.float32), expected.view(24, 2, 2, DIM)[slots]
    assert ((found - wanted).abs() <= 0.51 * wanted.abs().amax(-1, keepdim=True) / 127).all()
    assert (kv != -1).any(-1).sum() == 3 * 2 * 2


@pytest.mark.parametrize("changes", [{}, {"dtype": "bfloat16"}, {"deterministic": True}, {"kernels": "reference"}])
def test_an_engine_keeps_bytes_when_asked(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Prompts alike answer alike, cold, from shared blocks and beside others; nearly as without; GetEngine says so."""
    path = write_model(tmp_path, tiny_config())
    engine = make_engine(path, kv_cache_dtype="int8", max_chunk_tokens=17, **changes)
    engine.warm_up()
    cold = finish_all(engine, make_request(1, prompt=PROMPT))[1]
    assert engine._cache.hit_token_count == 0
    again = finish_all(engine, make_request(2, prompt=PROMPT), make_request(3, prompt=PROMPT[:40]))
    assert again[2] == cold
    assert engine._cache.hit_token_count > 0
    told = facts_of(engine, "m", generation_pb2.SamplingParameters())
    assert (told.dtype, told.kv_cache_dtype) == (engine.dtype, "int8")
    assert told.memory.kv_bytes == sum(layer.nbytes for layer in engine._runner.kv)
    assert told.memory.kv_formula == "2 x 2 layers x 2 kv heads x (16 + 4 of scale) x 1 bytes = 160 bytes a token"
    plain = make_engine(path, **changes)
    assert facts_of(plain, "m", generation_pb2.SamplingParameters()).kv_cache_dtype == plain.dtype == told.dtype


def test_the_same_memory_holds_about_twice_the_tokens(tmp_path: Path) -> None:
    """Of heads as wide as models have them."""
    path = write_model(tmp_path, tiny_config(head_dim=64))
    room = {"kv_blocks": None, "kv_memory_bytes": 400_000, "dtype": "bfloat16"}
    plain, kept = make_engine(path, **room), make_engine(path, kv_cache_dtype="int8", **room)
    assert plain.memory.kv_bytes_per_token / kept.memory.kv_bytes_per_token == pytest.approx(128 / 68)
    assert kept.limits.kv_token_capacity > 1.8 * plain.limits.kv_token_capacity


def test_where_it_cannot_be_it_is_refused(tmp_path: Path) -> None:
    """With the field and the reason."""
    odd = write_model(tmp_path, tiny_config(head_dim=10))
    with pytest.raises(ValueError, match=r"kv_cache_dtype is 'int8'.*head_dim in fours.*10"):
        make_engine(odd, kv_cache_dtype="int8")
    with pytest.raises(ValueError, match=r"kv_cache_dtype is 'int4'; it must be one of auto, int8"):
        make_engine(odd, kv_cache_dtype="int4")
