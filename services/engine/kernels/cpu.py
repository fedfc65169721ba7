"""CPU kernels from torch operators: prepacked oneDNN products, gathered attention.

Two facts carry the speed (measured on a 2-core Zen 4): a product with a weight in oneDNN's own layout is
about twice as fast as ``F.linear`` at one row, and a decode step that treats the query heads of one key/value
head as rows of one small matrix reads the KV once whatever the group size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from services.engine.kernels.base import AttentionBatch, Kernels, Linear
from services.engine.kernels.kv_int8 import from_rows, to_rows
from services.engine.plan import StepPlan

_LENGTH_RATIO = 1.25  # a decode group's longest context over its shortest; beyond, padding costs more
_LENGTH_SLACK = 64  # tokens; below this difference a second group's calls cost more than padding


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """One-token sequences of similar context, padded to the longest, L."""

    rows: torch.Tensor | None
    """[G] their rows in the step; None: the leading ones, in order."""
    count: int
    slots: torch.Tensor
    """[G * L] slots to gather; padding repeats the sequence's own last slot, so what is read was written."""
    mask: torch.Tensor | None
    """[G, 1, 1, L] 0 or -inf; None when nothing is padded."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one sequence, over a context of L."""

    start: int
    end: int
    slots: torch.Tensor
    """[L] slots to gather."""
    mask: torch.Tensor | None
    """[1, 1, n, L] 0 or -inf; None when the chunk is the whole context (plain causal)."""


@dataclass(frozen=True, slots=True)
class _Batch:
    decode_count: int
    groups: list[_DecodeGroup]
    chunks: list[_Chunk]


class CpuKernels(Kernels):
    """The default on a CPU; agrees with the reference to rounding."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Pack the weight for oneDNN once; keep it as it is where that is not possible."""
        if not can_pack(weight.dtype):
            return lambda x: functional.linear(x, weight, bias)
        product = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001 - has no public name
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)  # noqa: SLF001
        return lambda x: product(x, packed, bias, "none", [], "")

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Use torch's own."""
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate x [T, heads, D] in place, with the halves swapped by one roll."""
        swapped = x.roll(x.shape[-1] // 2, -1)
        x.mul_(cos).addcmul_(swapped, sin)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Gate one half with the other, in place on the temporary."""
        inner = gate_up.shape[1] // 2
        return functional.silu(gate_up[:, :inner]).mul_(gate_up[:, inner:])

    def rotate_and_store(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer_kv: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Rotate, then store all tokens in one indexed copy."""
        kv_heads = layer_kv.shape[3]
        self.rotate(qkv[:, :-kv_heads], cos, sin)
        stored = qkv[:, -2 * kv_heads :].reshape(-1, 2, kv_heads, qkv.shape[2])
        layer_kv.view(-1, *layer_kv.shape[2:]).index_copy_(0, slots, to_rows(stored, layer_kv.dtype))

    def prepare(self, plan: StepPlan, dtype: torch.dtype) -> AttentionBatch:
        """Group decode rows by length; note each chunk's slots and mask."""
        groups = [_decode_group(plan, members, dtype) for members in _by_length(plan)]
        chunks = [_chunk(plan, s, dtype) for s in range(plan.decode_count, plan.sequence_count)]
        return _Batch(plan.decode_count, groups, chunks)

    def attention(self, q: torch.Tensor, layer_kv: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Attend group by group, then chunk by chunk."""
        prepared: _Batch = batch
        slots_kv = layer_kv.view(-1, *layer_kv.shape[2:])  # [N * B, 2, Hkv, W]
        if len(prepared.groups) == 1 and not prepared.chunks:
            return _attend_group(q, slots_kv, prepared.groups[0])
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        for group in prepared.groups:
            if group.rows is None:
                out[: group.count] = _attend_group(q[: group.count], slots_kv, group)
            else:
                out[group.rows] = _attend_group(q[group.rows], slots_kv, group)
        for chunk in prepared.chunks:
            out[chunk.start : chunk.end] = _attend_chunk(q[chunk.start : chunk.end], slots_kv, chunk)
        return out


def can_pack(dtype: torch.dtype) -> bool:
    """True when oneDNN products with a packed weight exist here for this dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype is torch.float32:
        return True
    return dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001


def _attend_group(q: torch.Tensor, slots_kv: torch.Tensor, group: _DecodeGroup) -> torch.Tensor:
    count, heads, dim = q.shape
    kv_heads = slots_kv.shape[2]
    kv = from_rows(slots_kv.index_select(0, group.slots), q.dtype).view(count, -1, 2, kv_heads, dim)
    out = functional.scaled_dot_product_attention(
        q.reshape(count, kv_heads, heads // kv_heads, dim),  # a group's query heads are rows of one matrix
        kv[:, :, 0].transpose(1, 2),  # [G, Hkv, L, D]
        kv[:, :, 1].transpose(1, 2),
        attn_mask=group.mask,
    )
    return out.reshape(count, heads * dim)


def _attend_chunk(q: torch.Tensor, slots_kv: torch.Tensor, chunk: _Chunk) -> torch.Tensor:
    count, heads, dim = q.shape
    kv_heads = slots_kv.shape[2]
    group = heads // kv_heads
    kv = from_rows(slots_kv.index_select(0, chunk.slots), q.dtype)  # [L, 2, Hkv, D]
    shared = (kv_heads, group, kv.shape[0], dim)  # the group axis has stride 0: keys are not copied
    out = functional.scaled_dot_product_attention(
        q.reshape(count, kv_heads, group, dim).permute(1, 2, 0, 3),  # [Hkv, group, n, D]
        kv[:, 0].transpose(0, 1).unsqueeze(1).expand(shared),
        kv[:, 1].transpose(0, 1).unsqueeze(1).expand(shared),
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None,
    )
    return out.permute(2, 0, 1, 3).reshape(count, heads * dim)


def _by_length(plan: StepPlan) -> list[NDArray[np.int64]]:
    """Decode sequences in groups of similar context, each [G]; one group in step order when all are similar."""
    if plan.decode_count == 0:
        return []
    lengths = plan.context_lens[: plan.decode_count]
    if lengths.max() <= lengths.min() * _LENGTH_RATIO + _LENGTH_SLACK:
        return [np.arange(plan.decode_count)]
    groups: list[NDArray[np.int64]] = []
    order = np.argsort(lengths, kind="stable")
    first = 0
    for end in range(1, order.size + 1):
        limit = lengths[order[first]] * _LENGTH_RATIO + _LENGTH_SLACK
        if end == order.size or lengths[order[end]] > limit:
            groups.append(order[first:end])
            first = end
    return groups


def _decode_group(plan: StepPlan, members: NDArray[np.int64], dtype: torch.dtype) -> _DecodeGroup:
    lengths = plan.context_lens[members]
    longest = int(lengths.max())
    reach = np.arange(longest, dtype=np.int32)
    places = np.minimum(reach, lengths[:, None] - 1)  # [G, L]
    blocks = np.take_along_axis(plan.block_tables[members], places // plan.block_size, axis=1)
    slots = blocks * np.int32(plan.block_size) + places % plan.block_size
    mask = None
    if int(lengths.min()) < longest:
        padded = torch.from_numpy(reach >= lengths[:, None])
        mask = torch.zeros(padded.shape, dtype=dtype).masked_fill_(padded, float("-inf"))[:, None, None, :]
    whole = members.size == plan.decode_count
    return _DecodeGroup(
        rows=None if whole else torch.from_numpy(members),
        count=int(members.size),
        slots=torch.from_numpy(slots.reshape(-1)),
        mask=mask,
    )


def _chunk(plan: StepPlan, sequence: int, dtype: torch.dtype) -> _Chunk:
    start, end = int(plan.query_starts[sequence]), int(plan.query_starts[sequence + 1])
    context = int(plan.context_lens[sequence])
    places = np.arange(context, dtype=np.int32)
    blocks = plan.block_tables[sequence][places // plan.block_size]
    mask = None
    if context > end - start:
        hidden = torch.from_numpy(places[None, :] > plan.positions[start:end, None])
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[None, None]
    slots = blocks * np.int32(plan.block_size) + places % plan.block_size
    return _Chunk(start, end, torch.from_numpy(slots), mask)
