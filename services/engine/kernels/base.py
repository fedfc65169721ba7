"""The contract between the decoder and the arithmetic under it.

Knows shapes; nothing of layers, requests or blocks' fate. T tokens of a step, Hq query heads, Hkv key/value
heads, D dimensions a head, N blocks of B slots. A layer's KV is [N, B, 2, Hkv, W]: keys at index 0, values
at 1. W is D, or in a pool of int8 D codes and the scale behind them (``kv_int8``). A block is opaque to all others:
kernels may lay its bytes out in an order of their own. Slots that no token was written to may hold anything, NaN too,
and must never reach a result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from services.engine.plan import StepPlan

Linear = Callable[[torch.Tensor], torch.Tensor]
"""[T, inputs] contiguous → a new [T, outputs]."""

AttentionBatch = Any
"""What ``prepare`` made of a plan; private to the kernels that made it, good for every layer of one step."""


class Kernels(ABC):
    """Everything a decoder layer computes."""

    @abstractmethod
    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A product with a [outputs, inputs] weight and an optional [outputs] bias; may keep its own copy."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square normalisation over the last dimension; a new tensor like x."""

    @abstractmethod
    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * inner] → silu(first half) * second half, a new [T, inner]."""

    @abstractmethod
    def rotate_and_store(
        self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer_kv: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Rotate the queries and keys of qkv [T, Hq + 2 Hkv, D] in place; store keys and values in the layer's pool.

        cos and sin are [T, 1, D], the sine signed as in ``rope``; slots [T] int64. qkv is contiguous.
        """

    @abstractmethod
    def prepare(self, plan: StepPlan, dtype: torch.dtype) -> AttentionBatch:
        """What attention needs to know of a plan, once a step; the dtype is that of the queries."""

    @abstractmethod
    def attention(self, q: torch.Tensor, layer_kv: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Causal attention of q [T, Hq, D] over each token's own sequence; a new contiguous [T, Hq * D].

        Scores are scaled by 1 / sqrt(D). The keys and values of the step's tokens are already written.
        """
