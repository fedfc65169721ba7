"""Kernels whose results for a token do not depend, by a single bit, on the other tokens of the step.

What a product, a sum or an exponential rounds to depends on the shape that it is computed in: how many rows, where
a thread's part begins, which instruction does the rest. So every row-wise operation here runs on tiles of a fixed
number of rows, the last one padded, and every query attends over its own context, padded to a whole number of
``KV_SPLIT`` places, as an independent unit in float32, on one thread. A token's bits then depend on its sequence alone:
whatever the batch, the chunk, and whether its prefix was computed now or found in the cache.

Which tile is safe is not assumed but tried, for each weight when it is loaded (``_safe_rows``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from services.engine.kernels.base import AttentionBatch, Linear
from services.engine.kernels.cpu import CpuKernels
from services.engine.kernels.kv_int8 import from_rows
from services.engine.plan import StepPlan

KV_SPLIT = 64
TILES = (16, 8, 1)
"""Rows that are computed together, the first choice first."""
_LINE = 16  # float32 values in a cache line
_SERIAL = 32_768  # elements up to which torch uses one thread for an elementwise operation


@dataclass(frozen=True, slots=True)
class _Unit:
    """Queries of one sequence that see the same number of places, padded: L."""

    start: int
    end: int
    slots: torch.Tensor
    """[L] slots to gather; padding repeats the last token's slot, so what is read was written."""
    mask: torch.Tensor
    """[n, 1, 1, L] 0 or -inf."""


class DeterministicKernels(CpuKernels):
    """Slower than its parent, and the same bits whatever the company."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Multiply tiles of a fixed number of rows."""
        product = super().linear(weight, bias)
        rows = _safe_rows(product, weight.shape[1], weight.dtype)
        return lambda x: _by_tiles(product, x, rows)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Normalise tiles small enough for one thread."""
        norm = super().rms_norm
        return _by_tiles(lambda tile: norm(tile, weight, eps), x, _serial_rows(x.shape[1:].numel()))

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate by single products and sums, each of which is exactly rounded wherever it is computed."""
        swapped = x.roll(x.shape[-1] // 2, -1).mul_(sin)
        x.mul_(cos).add_(swapped)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Gate tiles small enough for one thread."""
        return _by_tiles(super().silu_mul, gate_up, _serial_rows(gate_up.shape[1]))

    def prepare(self, plan: StepPlan, dtype: torch.dtype) -> AttentionBatch:
        """Cut every sequence where the padded number of visible places changes."""
        del dtype
        return [unit for s in range(plan.sequence_count) for unit in _units(plan, s)]

    def attention(self, q: torch.Tensor, layer_kv: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Attend unit by unit, each query as a batch entry of its own."""
        units: list[_Unit] = batch
        slots_kv = layer_kv.view(-1, *layer_kv.shape[2:])  # [N * B, 2, Hkv, W]
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # each thread's scratch has its own alignment, and products differ by alignment
        try:
            for unit in units:
                out[unit.start : unit.end] = _attend(q[unit.start : unit.end], slots_kv, unit)
        finally:
            torch.set_num_threads(threads)
        return out


def _attend(q: torch.Tensor, slots_kv: torch.Tensor, unit: _Unit) -> torch.Tensor:
    count, heads, dim = q.shape
    kv_heads = slots_kv.shape[2]
    kv = _aligned(from_rows(slots_kv.index_select(0, unit.slots), torch.float32))  # [L, 2, Hkv, D or more]
    shared = (count, kv_heads, kv.shape[0], kv.shape[-1])  # the query axis has stride 0: keys are not copied
    out = functional.scaled_dot_product_attention(
        _aligned(q).reshape(count, kv_heads, heads // kv_heads, kv.shape[-1]),
        kv[:, 0].transpose(0, 1).unsqueeze(0).expand(shared),
        kv[:, 1].transpose(0, 1).unsqueeze(0).expand(shared),
        attn_mask=unit.mask,
        scale=dim**-0.5,
    )
    return out[..., :dim].reshape(count, heads * dim)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """In float32, contiguous, each row of the last dimension padded to a whole number of cache lines."""
    missing = -x.shape[-1] % _LINE
    return functional.pad(x.float(), (0, missing)) if missing else x.float().contiguous()


def _by_tiles(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, rows: int) -> torch.Tensor:
    """Apply a row-wise function to tiles of exactly ``rows`` rows; rows are along the first dimension."""
    x = x.contiguous()
    count = x.shape[0]
    missing = -count % rows
    if missing:
        x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
    if count <= rows:
        return function(x)[:count].contiguous()
    return torch.cat([function(tile) for tile in torch.split(x, rows)])[:count]


def _serial_rows(width: int) -> int:
    return max(1, min(TILES[0], _SERIAL // width))


@torch.inference_mode()
def _safe_rows(product: Linear, width: int, dtype: torch.dtype) -> int:
    """The largest tile in which a row's result is the same at every place; one row is always safe."""
    generator = torch.Generator().manual_seed(0)
    for rows in TILES[:-1]:
        x = torch.randn((rows, width), generator=generator).to(dtype)
        expected = product(x)
        moved = [product(x.roll(shift, 0)).roll(-shift, 0) for shift in range(1, rows)]
        if all(torch.equal(found, expected) for found in moved):
            return rows
    return TILES[-1]


def _units(plan: StepPlan, sequence: int) -> list[_Unit]:
    start, end = int(plan.query_starts[sequence]), int(plan.query_starts[sequence + 1])
    positions = plan.positions[start:end]
    padded = (positions // KV_SPLIT + 1) * KV_SPLIT  # places that each query is computed over
    cuts: NDArray[np.int64] = np.flatnonzero(np.diff(padded)) + 1
    bounds = [0, *cuts.tolist(), end - start]
    units = []
    for first, last in pairwise(bounds):
        places = np.arange(padded[first], dtype=np.int32)
        reached = np.minimum(places, positions[last - 1])
        blocks = plan.block_tables[sequence][reached // plan.block_size]
        hidden = torch.from_numpy(places[None, :] > positions[first:last, None])
        units.append(
            _Unit(
                start=start + first,
                end=start + last,
                slots=torch.from_numpy(blocks * np.int32(plan.block_size) + reached % plan.block_size),
                mask=torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))[:, None, None, :],
            )
        )
    return units
