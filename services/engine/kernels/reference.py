"""The oracle: every kernel in the fewest obvious lines, in float32 inside, one sequence after another."""

from __future__ import annotations

import math

import torch

from services.engine.kernels.base import AttentionBatch, Kernels, Linear
from services.engine.kernels.kv_int8 import from_rows, to_rows
from services.engine.plan import StepPlan


class ReferenceKernels(Kernels):
    """Slow and plain; what the others are compared with."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Multiply by the weight as it is."""
        return lambda x: torch.nn.functional.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Divide by the root of the mean square (Zhang and Sennrich, 2019)."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return scaled.to(x.dtype) * weight

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Gate one half with the other."""
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def rotate_and_store(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer_kv: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Turn each pair of dimensions; store token by token."""
        size, kv_heads = layer_kv.shape[1], layer_kv.shape[3]
        turned = qkv[:, :-kv_heads]
        first, second = turned.chunk(2, dim=-1)
        turned.copy_(turned * cos + torch.cat([second, first], dim=-1) * sin)
        for row, slot in zip(qkv, slots.tolist(), strict=True):
            stored = row[-2 * kv_heads :].view(2, kv_heads, -1)
            layer_kv[slot // size, slot % size] = to_rows(stored, layer_kv.dtype)

    def prepare(self, plan: StepPlan, dtype: torch.dtype) -> AttentionBatch:
        """Keep the plan as it is."""
        del dtype
        return plan

    def attention(self, q: torch.Tensor, layer_kv: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Attend token by token."""
        plan: StepPlan = batch
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        group = q.shape[1] // layer_kv.shape[3]
        for s in range(plan.sequence_count):
            context = int(plan.context_lens[s])
            blocks = torch.from_numpy(plan.block_tables[s]).long()
            rows = layer_kv[blocks].flatten(0, 1)[:context]
            kv = from_rows(rows, torch.float32).float()  # [context, 2, Hkv, D]
            keys = kv[:, 0].repeat_interleave(group, dim=1)  # [context, Hq, D]
            values = kv[:, 1].repeat_interleave(group, dim=1)
            for row in range(int(plan.query_starts[s]), int(plan.query_starts[s + 1])):
                visible = int(plan.positions[row]) + 1
                scores = torch.einsum("hd,khd->hk", q[row].float(), keys[:visible]) / math.sqrt(q.shape[2])
                out[row] = torch.einsum("hk,khd->hd", scores.softmax(-1), values[:visible]).to(q.dtype)
        return out.flatten(1)
