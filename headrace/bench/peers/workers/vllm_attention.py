"""vLLM's attention over its paged cache as a worker: `vllm_attention.py THREADS`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

import torch
import vllm
from attention import HEAD_DIM, LAYERS, Shape, measuring
from serving import answer
from vllm import _custom_ops as ops
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

BLOCK_SIZE = 128  # its own choice on a CPU


def prepare(shape: Shape) -> Callable[[], None]:
    """Caches as its CPU backend makes them; the metadata of a step is made once, and not measured."""
    shape = replace(shape, block_size=BLOCK_SIZE)
    tables, count = shape.block_tables, shape.sequences
    caches = [
        shape.random(int(tables.max()) + 1, shape.kv_heads, shape.block_size * 2, HEAD_DIM) for _ in range(LAYERS)
    ]
    query = shape.random(count, shape.heads, HEAD_DIM)
    output, starts = torch.empty_like(query), torch.arange(count + 1, dtype=torch.int32)
    lengths = torch.full((count,), shape.context, dtype=torch.int32)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=count,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=HEAD_DIM,
        seq_lens=lengths,
        dtype=torch.bfloat16,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=_get_attn_isa(torch.bfloat16, shape.block_size, HEAD_DIM),
        enable_kv_split=True,
    )

    def compute() -> None:
        for cache in caches:
            keys, values = cache.chunk(2, dim=2)
            ops.cpu_attention_with_kv_cache(
                query=query,
                key_cache=keys,
                value_cache=values,
                output=output,
                query_start_loc=starts,
                seq_lens=lengths,
                scale=HEAD_DIM**-0.5,
                causal=True,
                alibi_slopes=None,
                sliding_window=-1,
                block_table=tables,
                softcap=0.0,
                scheduler_metadata=metadata,
                s_aux=None,
            )

    return compute


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    answer(f"vLLM {vllm.__version__}, attention", measuring(prepare))
