"""Headrace's attention as a worker: `ours_attention THREADS`.

It is part of one operator for all layers, so a stack of layers is measured whose other parts are next to nothing:
hidden states and an MLP of a few numbers, no logits. What they cost is in our figure.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from headrace.bench.peers.workers.attention import HEAD_DIM, LAYERS, Shape, measuring
from headrace.bench.peers.workers.serving import answer
from headrace.models.families import FAMILIES
from services.engine.kernels import native
from services.engine.model.config import ModelConfig, RopeConfig
from services.engine.model.native import NativeDecoder
from services.engine.model.weights import WeightReader, expected_tensors
from services.engine.plan import PlannedSequence, build_plan
from services.engine.runner import allocate_kv, tensors_of

SMALL = 32
CPU = torch.device("cpu")


class RandomWeights(WeightReader):
    """Weights that are in no file."""

    def __init__(self, config: ModelConfig) -> None:
        self._expected = expected_tensors(config)

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        return torch.randn(self._expected[name]).to(torch.bfloat16)


def prepare(shape: Shape) -> Callable[[], None]:
    """A step in which each sequence has one token."""
    config = ModelConfig(
        family=FAMILIES["LlamaForCausalLM"],
        vocab_size=SMALL,
        hidden_size=SMALL,
        intermediate_size=SMALL,
        layer_count=LAYERS,
        head_count=shape.heads,
        kv_head_count=shape.kv_heads,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-5,
        rope=RopeConfig(10_000.0),
        context_length=shape.context,
        tied_embeddings=True,
        qkv_bias=False,
        output_bias=False,
        dtype="bfloat16",
        eos_token_ids=frozenset(),
    )
    decoder, kernels = NativeDecoder(config, RandomWeights(config), shape.context), native.NativeKernels()
    tables = shape.block_tables
    pool = allocate_kv(config, int(tables.max()), shape.block_size, torch.bfloat16)
    for layer in pool:
        layer.copy_(shape.random(*layer.shape))
    one = torch.ones(1, dtype=torch.int32).numpy()
    plan = build_plan(
        [PlannedSequence(one, shape.context - 1, table.numpy(), logit_count=0) for table in tables], shape.block_size
    )
    tensors, batch = tensors_of(plan, CPU), kernels.prepare(plan, torch.bfloat16)

    def compute() -> None:
        decoder.forward(*tensors, kv=pool, batch=batch)

    return compute


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    missing = native.load()
    if missing is not None:
        raise SystemExit(missing)
    answer("Headrace, attention", measuring(prepare))
