"""The GPU kernels agree with the reference: on a GPU as compiled, elsewhere by Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from services.engine.kernels import ReferenceKernels
from services.engine.kernels.kv_int8 import from_rows, row_width
from services.engine.kernels.triton import unusable
from services.engine.randomness import gumbel, row_key
from tests.engine.kernels.plans import make_plan, written_pool

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REASON = unusable(DEVICE)
if REASON is not None and not os.environ.get("CI"):  # in CI a missing package is an error
    pytest.skip(f"the GPU kernels cannot run here: {REASON}", allow_module_level=True)

from services.engine.kernels.triton.attention import split_count
from services.engine.kernels.triton.draw import draw
from services.engine.kernels.triton.kernels import TritonKernels

MIXED = [(37, 1), (130, 1), (1, 1), (40, 40), (83, 5), (3, 2)]
TOLERANCES = {
    torch.float32: {"atol": 2e-5, "rtol": 2e-5},
    torch.bfloat16: {"atol": 3e-2, "rtol": 2e-2},
}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "dtype"),
    [
        (2, 2, 16, 8, torch.float32),
        (6, 2, 64, 16, torch.bfloat16),  # three heads a group: rows that no head owns
        (7, 1, 32, 32, torch.float32),
        (4, 2, 80, 16, torch.float32),  # not a power of two
        (8, 1, 128, 16, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [MIXED, [(65, 1)], [(70, 70)]], ids=["mixed", "decode", "chunk"])
def test_attention_equals_the_reference(
    lengths: list[tuple[int, int]], heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Split contexts, chunks over cached prefixes, any group and block size; unwritten slots hold NaN."""
    generator = torch.Generator().manual_seed(3)
    plan, blocks = make_plan(lengths, block_size)
    kv = written_pool(plan, blocks, kv_heads, dim, dtype, generator)
    qkv = torch.randn((plan.token_count, heads + 2 * kv_heads, dim), generator=generator).to(dtype)
    fast, plain = TritonKernels(DEVICE, heads // kv_heads), ReferenceKernels()
    found = fast.attention(qkv.to(DEVICE)[:, :heads], kv.to(DEVICE), fast.prepare(plan, dtype))
    expected = plain.attention(qkv[:, :heads], kv, plain.prepare(plan, dtype))
    torch.testing.assert_close(found.cpu(), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "dtype"),
    [(6, 2, 20, 8, torch.float32), (4, 1, 64, 16, torch.bfloat16)],
    ids=str,
)
def test_attention_over_bytes_is_that_over_their_numbers(
    heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Split contexts and chunks over a pool of int8; slots that nobody wrote have NaN for a scale."""
    generator = torch.Generator().manual_seed(5)
    plan, blocks = make_plan(MIXED, block_size)
    kv = written_pool(plan, blocks, kv_heads, dim, torch.int8, generator)
    q = torch.randn((plan.token_count, heads, dim), generator=generator).to(dtype)
    fast, plain = TritonKernels(DEVICE, heads // kv_heads), ReferenceKernels()
    found = fast.attention(q.to(DEVICE), kv.to(DEVICE), fast.prepare(plan, dtype))
    expected = plain.attention(q, from_rows(kv, torch.float32), plain.prepare(plan, dtype))
    torch.testing.assert_close(found.cpu(), expected, **TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_stored_as_the_reference_stores_them(dtype: torch.dtype) -> None:
    """Codes and scales of turned keys and of values, zeros too; what is not finite spoils its row and no other."""
    generator = torch.Generator().manual_seed(7)
    dim, slots = 20, torch.tensor([9, 31, 8, 2])
    qkv = torch.randn((4, 7, dim), generator=generator).to(dtype)
    cos, sin = (torch.randn((4, 1, dim), generator=generator).to(dtype) for _ in range(2))
    qkv[1, 5], qkv[2, 3, 1], qkv[2, 6, 2] = 0, float("nan"), float("nan")
    there = qkv.to(DEVICE, copy=True)
    pools = [torch.zeros(4, 8, 2, 2, row_width(dim, torch.int8), dtype=torch.int8, device=d) for d in ("cpu", DEVICE)]
    ReferenceKernels().rotate_and_store(qkv, cos, sin, pools[0], slots)
    rotated = TritonKernels(DEVICE, 3)
    rotated.rotate_and_store(there, cos.to(DEVICE), sin.to(DEVICE), pools[1], slots.to(DEVICE))
    wanted, found = (from_rows(pool.cpu().view(32, 4, -1), torch.float32) for pool in pools)
    finite = torch.ones(32, 4, dtype=torch.bool)
    finite[8, 0] = finite[8, 3] = False
    assert wanted.isfinite().all(-1).equal(finite)
    assert found.isfinite().all(-1).equal(finite)
    scale = wanted[finite].abs().amax(-1, keepdim=True) / 127
    assert ((found - wanted)[finite].abs() <= 1.01 * scale).all()  # a code may round to its neighbour
    assert (pools[1].cpu() == pools[0]).float().mean() > 0.98


def test_contexts_are_split_where_tokens_are_few() -> None:
    """One token of eight key/value heads fills 132 processors with 32 programs each head; 64 tokens need none split."""
    assert [split_count(tokens, 8, 132) for tokens in (1, 2, 8, 64, 512)] == [32, 16, 4, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [16, 80])
def test_row_operations_equal_the_reference(dim: int, dtype: torch.dtype) -> None:
    """Normalisation of rows and of heads inside a wider tensor, gating, rotation with the KV write."""
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    fast, plain, tolerance = TritonKernels(DEVICE, 3), ReferenceKernels(), TOLERANCES[dtype]
    x, gain = random(3, 2 * dim), random(2 * dim)
    found = fast.rms_norm(x.to(DEVICE), gain.to(DEVICE), 1e-5)
    torch.testing.assert_close(found.cpu(), plain.rms_norm(x, gain, 1e-5), **tolerance)
    torch.testing.assert_close(fast.silu_mul(x.to(DEVICE)).cpu(), plain.silu_mul(x), **tolerance)

    qkv, gain, cos, sin = random(3, 7, dim), random(dim), random(3, 1, dim), random(3, 1, dim)
    found = fast.rms_norm(qkv.to(DEVICE)[:, 3:5], gain.to(DEVICE), 1e-5)
    torch.testing.assert_close(found.cpu(), plain.rms_norm(qkv[:, 3:5], gain, 1e-5), **tolerance)

    there, slots = qkv.to(DEVICE, copy=True), torch.tensor([9, 31, 8])
    pools = [torch.zeros(4, 8, 2, 2, dim, dtype=dtype), torch.zeros(4, 8, 2, 2, dim, dtype=dtype, device=DEVICE)]
    plain.rotate_and_store(qkv, cos, sin, pools[0], slots)
    fast.rotate_and_store(there, cos.to(DEVICE), sin.to(DEVICE), pools[1], slots.to(DEVICE))
    torch.testing.assert_close(there.cpu(), qkv, **tolerance)
    torch.testing.assert_close(pools[1].cpu(), pools[0], **tolerance)
    assert torch.equal(pools[1].view(-1, 2, 2, dim)[slots.to(DEVICE)], there[:, 3:].view(-1, 2, 2, dim))


def test_draws_are_those_of_the_cpu() -> None:
    """Rows of 2,500 tokens, int64 extremes as seeds: the winner is that of the logits plus ``gumbel``."""
    generator = torch.Generator().manual_seed(6)
    rows = [(seed, position) for seed in (0, -1, 2**63 - 1, -(2**63), 7) for position in (0, 1, 900)]
    scaled = 3 * torch.randn((len(rows), 2500), generator=generator)
    scaled -= scaled.amax(dim=1, keepdim=True)
    keys = np.array([row_key(*row) for row in rows], dtype=np.uint64).view(np.int64)
    found = draw(scaled.to(DEVICE), torch.from_numpy(keys).to(DEVICE), lowest=-25.0)
    ids = np.arange(2500)
    expected = [int(np.argmax(row.numpy() + gumbel(*at, ids))) for at, row in zip(rows, scaled, strict=True)]
    assert found.tolist() == expected
    assert len(set(expected)) > len(expected) // 2


def test_unlikely_tokens_are_never_drawn() -> None:
    """Whatever the noise, a logit at or below the bound loses, -inf too."""
    scaled = torch.full((8, 40), -25.0, device=DEVICE)
    scaled[:, 20:] = float("-inf")
    scaled[:, 17] = 0.0
    keys = torch.arange(8, device=DEVICE)
    assert draw(scaled, keys, lowest=-25.0).tolist() == [17] * 8


def test_every_kernel_compiles_for_two_generations(tmp_path: Path) -> None:
    """Machine code for compute capabilities 8.0 and 9.0, made without a GPU; shared memory fits their cards."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernels.compile_triton", "80", "90"],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"(\w+) (sm_\d+): \d+ bytes, (\d+) of shared memory", done.stdout)
    kernels = {"_attend", "_join", "_rms_norm", "_silu_mul", "_rotate_and_store", "_draw"}
    assert {(name, target) for name, target, _ in found} == {(k, t) for k in kernels for t in ("sm_80", "sm_90")}
    assert max(int(shared) for _, _, shared in found) <= 99 * 1024
