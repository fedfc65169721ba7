"""The fast kernels agree with the plain ones, and no unwritten slot reaches a result."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.engine.kernels import CpuKernels, ReferenceKernels
from services.engine.plan import PlannedSequence, StepPlan, build_plan

DIM = 16


def _plan(lengths: list[tuple[int, int]], block_size: int) -> tuple[StepPlan, int]:
    """A plan of (context, new tokens) sequences over shuffled blocks; and how many blocks that takes."""
    blocks = [-(-context // block_size) for context, _ in lengths]
    order = np.random.default_rng(0).permutation(sum(blocks)).astype(np.int32) + 1
    starts = np.cumsum([0, *blocks])
    planned = [
        PlannedSequence(
            token_ids=np.zeros(new, dtype=np.int32),
            start=context - new,
            block_table=order[starts[i] : starts[i + 1]],
            needs_logits=True,
        )
        for i, (context, new) in enumerate(lengths)
    ]
    return build_plan(planned, block_size), sum(blocks)


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
    plan, blocks = _plan(lengths, block_size=8)
    kv = torch.full((blocks + 1, 8, 2, kv_heads, DIM), float("nan"), dtype=dtype)
    for s in range(plan.sequence_count):
        for position in range(int(plan.context_lens[s])):
            block = int(plan.block_tables[s][position // 8])
            kv[block, position % 8] = torch.randn((2, kv_heads, DIM), generator=generator).to(dtype)
    q = torch.randn((plan.token_count, heads, DIM), generator=generator).to(dtype)
    fast, plain = CpuKernels(), ReferenceKernels()
    found = fast.attention(q, kv, fast.prepare(plan, dtype))
    expected = plain.attention(q, kv, plain.prepare(plan, dtype))
    assert found.shape == (plan.token_count, heads * DIM)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_operations_equal_the_reference(dtype: torch.dtype) -> None:
    """Products, normalisation, rotation, gating and the KV write."""
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
    turned = random(5, 3, DIM)
    again = turned.clone()
    cos, sin = random(5, 1, DIM), random(5, 1, DIM)
    fast.rotate(turned, cos, sin)
    plain.rotate(again, cos, sin)
    torch.testing.assert_close(turned, again, **tolerance)
    pools = [torch.zeros(4, 8, 2, 1, DIM, dtype=dtype) for _ in range(2)]
    values, slots = random(3, 2, 1, DIM), torch.tensor([9, 31, 8])
    fast.write_kv(values, pools[0], slots)
    plain.write_kv(values, pools[1], slots)
    assert torch.equal(pools[0], pools[1])
