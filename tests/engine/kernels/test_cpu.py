"""The fast kernels agree with the plain ones, and no unwritten slot reaches a result."""

from __future__ import annotations

import pytest
import torch

from services.engine.kernels import CpuKernels, ReferenceKernels
from tests.engine.kernels.plans import make_plan, written_pool

DIM = 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (7, 1), (8, 4)])
@pytest.mark.parametrize(
    "lengths",
    [
        [(1, 1)],
        [(5, 1), (300, 1), (9, 1), (310, 1), (33, 1)],
        [(16, 1), (17, 1), (40, 40), (50, 7), (64, 64)],
        [(3, 2)],
    ],
    ids=["one", "decode", "mixed", "chunk"],
)
def test_attention_equals_the_reference(
    heads: int, kv_heads: int, lengths: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    """Decode groups, chunks and mixtures; slots that nobody wrote hold NaN, the null block too."""
    generator = torch.Generator().manual_seed(3)
    plan, blocks = make_plan(lengths, block_size=8)
    kv = written_pool(plan, blocks, kv_heads, DIM, dtype, generator)
    q = torch.randn((plan.token_count, heads, DIM), generator=generator).to(dtype)
    fast, plain = CpuKernels(), ReferenceKernels()
    found = fast.attention(q, kv, fast.prepare(plan, dtype))
    expected = plain.attention(q, kv, plain.prepare(plan, dtype))
    assert found.shape == (plan.token_count, heads * DIM)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_operations_equal_the_reference(dtype: torch.dtype) -> None:
    """Products, normalisation, gating, rotation with the KV write."""
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    fast, plain = CpuKernels(), ReferenceKernels()
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 5e-2, "rtol": 2e-2}
    weight, bias = random(24, 32), random(24)
    for rows in (1, 5, 64):
        x = random(rows, 32)
        for b in (None, bias):
            torch.testing.assert_close(fast.linear(weight, b)(x), plain.linear(weight, b)(x), **tolerance)
    x, scale = random(5, 32), random(32)
    torch.testing.assert_close(fast.rms_norm(x, scale, 1e-5), plain.rms_norm(x, scale, 1e-5), **tolerance)
    torch.testing.assert_close(fast.silu_mul(x), plain.silu_mul(x), **tolerance)
    placed = random(3, 7, DIM)  # three query heads, two key heads, two value heads
    again = placed.clone()
    cos, sin, slots = random(3, 1, DIM), random(3, 1, DIM), torch.tensor([9, 31, 8])
    pools = [torch.zeros(4, 8, 2, 2, DIM, dtype=dtype) for _ in range(2)]
    fast.rotate_and_store(placed, cos, sin, pools[0], slots)
    plain.rotate_and_store(again, cos, sin, pools[1], slots)
    torch.testing.assert_close(placed, again, **tolerance)
    torch.testing.assert_close(pools[0], pools[1], **tolerance)
    assert torch.equal(pools[0].view(-1, 2, 2, DIM)[slots], placed[:, 3:].view(-1, 2, 2, DIM))
