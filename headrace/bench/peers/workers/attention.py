"""What attention of decoded tokens is measured on, and how, whoever computes it. Needs torch alone.

A worker is told a shape, and answers with milliseconds: of one layer's attention over all sequences, each of which has
one query. Layers have pools of their own, together larger than any cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

HEAD_DIM = 64
LAYERS = 8
PASSES = 12
WARM_UP_PASSES = 2


@dataclass(frozen=True)
class Shape:
    """What is asked for; `group` query heads share each of `kv_heads`."""

    group: int
    kv_heads: int
    sequences: int
    context: int
    block_size: int = 16  # unless an engine prefers another

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.group * self.kv_heads

    @property
    def block_tables(self) -> torch.Tensor:
        """[sequences, blocks] int32, scattered over the pool, from 1."""
        blocks = -(-self.context // self.block_size)
        order = torch.randperm(self.sequences * blocks, generator=torch.Generator().manual_seed(0)) + 1
        return order.view(self.sequences, blocks).int()

    def random(self, *sizes: int) -> torch.Tensor:
        """bfloat16 numbers as activations are."""
        return torch.randn(*sizes, dtype=torch.float32).to(torch.bfloat16)


Prepare = Callable[[Shape], Callable[[], None]]
"""Makes pools for a shape; what it returns computes all layers once."""


def measuring(prepare: Prepare) -> Callable[[dict[str, int]], dict[str, Any]]:
    """Answers to a shape, for `serving.answer`."""

    def measured(asked: dict[str, int]) -> dict[str, Any]:
        with torch.inference_mode():
            compute = prepare(Shape(**asked))
            seconds = []
            for _ in range(WARM_UP_PASSES + PASSES):
                begun = time.perf_counter()
                compute()
                seconds.append(time.perf_counter() - begun)
        return {"ms": statistics.median(seconds[WARM_UP_PASSES:]) / LAYERS * 1e3}

    return measured
