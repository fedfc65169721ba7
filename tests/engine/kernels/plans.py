"""Plans of sequences over shuffled blocks, and pools in which only their slots are written."""

from __future__ import annotations

import numpy as np
import torch

from services.engine.kernels.kv_int8 import to_rows
from services.engine.plan import PlannedSequence, StepPlan, build_plan


def make_plan(lengths: list[tuple[int, int]], block_size: int) -> tuple[StepPlan, int]:
    """A plan of (context, new tokens) sequences over shuffled blocks; and how many blocks that takes."""
    blocks = [-(-context // block_size) for context, _ in lengths]
    order = np.random.default_rng(0).permutation(sum(blocks)).astype(np.int32) + 1
    starts = np.cumsum([0, *blocks])
    planned = [
        PlannedSequence(
            token_ids=np.zeros(new, dtype=np.int32),
            start=context - new,
            block_table=order[starts[i] : starts[i + 1]],
            logit_count=1,
        )
        for i, (context, new) in enumerate(lengths)
    ]
    return build_plan(planned, block_size), sum(blocks)


def written_pool(
    plan: StepPlan, blocks: int, kv_heads: int, dim: int, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """[blocks + 1, B, 2, Hkv, W] with random keys and values at every place of the contexts, NaN everywhere else."""
    size = plan.block_size
    wide = torch.float32 if dtype is torch.int8 else dtype
    kv = torch.full((blocks + 1, size, 2, kv_heads, dim), float("nan"), dtype=wide)
    for s in range(plan.sequence_count):
        for position in range(int(plan.context_lens[s])):
            block = int(plan.block_tables[s][position // size])
            kv[block, position % size] = torch.randn((2, kv_heads, dim), generator=generator).to(wide)
    return to_rows(kv, dtype)  # the scale of a row of NaN is NaN
