"""What the decoder asks of kernels, answered on a GPU: Triton, and torch's products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from services.engine.kernels.base import AttentionBatch, Kernels, Linear
from services.engine.kernels.triton import attention, rows
from services.engine.plan import StepPlan
from services.engine.transfer import to_device

_PROCESSORS_OF_NO_GPU = 8


@dataclass(frozen=True, slots=True)
class TritonBatch:
    """A plan's sequences on the device, int32."""

    query_starts: torch.Tensor
    """[S + 1] as in the plan."""
    context_lens: torch.Tensor
    """[S] as in the plan."""
    block_tables: torch.Tensor
    """[S, widest] as in the plan, or wider."""
    decode_tiles: torch.Tensor
    """[decoded, 2] sequence and row of each decoded token; both are its own number."""
    chunk_tiles: torch.Tensor
    """[tiles, 2] sequence and first row of each tile of the chunks."""


class TritonKernels(Kernels):
    """The kernels of one device; they agree with the reference to rounding."""

    def __init__(self, device: torch.device, group: int) -> None:
        """Know the device, and how many query heads share a key/value head."""
        self._device = device
        self._group = group
        self._processors = _PROCESSORS_OF_NO_GPU
        if device.type == "cuda":
            self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Multiply by the weight as it is."""
        return lambda x: functional.linear(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """One program a row."""
        return rows.rms_norm(x, weight, eps)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """One pass."""
        return rows.silu_mul(gate_up)

    def rotate_and_store(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer_kv: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """One program a token and head."""
        rows.rotate_and_store(qkv, cos, sin, layer_kv, slots)

    def prepare(self, plan: StepPlan, dtype: torch.dtype) -> AttentionBatch:
        """Cut chunks into tiles; bring all to the device."""
        del dtype
        decoded = np.arange(plan.decode_count, dtype=np.int32)
        return TritonBatch(
            self._there(plan.query_starts),
            self._there(plan.context_lens),
            self._there(plan.block_tables),
            self._there(np.stack([decoded, decoded], axis=1)),
            self._there(_chunk_tiles(plan, attention.chunk_rows(self._group) // self._group)),
        )

    def attention(self, q: torch.Tensor, layer_kv: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Decoded tokens with split contexts, then chunks."""
        prepared: TritonBatch = batch
        out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
        decoded = prepared.decode_tiles.shape[0]
        places = (prepared.query_starts, prepared.context_lens, prepared.block_tables)
        if decoded:
            splits = attention.split_count(decoded, layer_kv.shape[3], self._processors)
            width = attention.decode_rows(self._group)
            attention.attend(q, layer_kv, out, prepared.decode_tiles, *places, rows=width, splits=splits)
        if prepared.chunk_tiles.shape[0]:
            width = attention.chunk_rows(self._group)
            attention.attend(q, layer_kv, out, prepared.chunk_tiles, *places, rows=width, splits=1)
        return out

    def _there(self, values: NDArray[np.int32]) -> torch.Tensor:
        return to_device(values, self._device)


def _chunk_tiles(plan: StepPlan, tokens: int) -> NDArray[np.int32]:
    """[tiles, 2] the sequence and first row of every ``tokens`` rows, or fewer at its end, of each chunk."""
    tiles = [
        (sequence, first)
        for sequence in range(plan.decode_count, plan.sequence_count)
        for first in range(int(plan.query_starts[sequence]), int(plan.query_starts[sequence + 1]), tokens)
    ]
    return np.array(tiles, dtype=np.int32).reshape(-1, 2)
