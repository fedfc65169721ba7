"""Carries out a plan: arrays become tensors, tensors become tokens.

Owns the KV pool's memory; knows neither why a plan is what it is nor what becomes of its tokens.
"""

from __future__ import annotations

import torch

from services.engine.kernels.base import Kernels
from services.engine.model.config import ModelConfig
from services.engine.model.decoder import Decoder
from services.engine.plan import Sampled, StepPlan
from services.engine.request import Request
from services.engine.sampler import Sampler


def allocate_kv(config: ModelConfig, block_count: int, block_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """One [block_count + 1, block_size, 2, kv_heads, head_dim] pool a layer; pages are touched on first use."""
    shape = (block_count + 1, block_size, 2, config.kv_head_count, config.head_dim)
    return [torch.empty(shape, dtype=dtype) for _ in range(config.layer_count)]


class ModelRunner:
    """The decoder, its kernels, its KV pool and the sampler, as one call a step."""

    def __init__(self, decoder: Decoder, kernels: Kernels, sampler: Sampler, kv: list[torch.Tensor]) -> None:
        self.kv = kv
        self._decoder = decoder
        self._kernels = kernels
        self._sampler = sampler

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Compute a plan; [L, vocabulary] logits of its logit rows."""
        return self._decoder.forward(
            token_ids=torch.from_numpy(plan.token_ids),
            positions=torch.from_numpy(plan.positions),
            slots=torch.from_numpy(plan.slots).long(),
            logit_rows=torch.from_numpy(plan.logit_rows).long(),
            kv=self.kv,
            batch=self._kernels.prepare(plan, self.kv[0].dtype),
        )

    def step(self, plan: StepPlan, requests: list[Request]) -> list[Sampled]:
        """Compute a plan and choose a token for each of the [L] requests that its logit rows belong to."""
        logits = self.run(plan)
        return self._sampler.sample(logits, requests) if requests else []
