"""How much of a GPU's memory the KV pool may take: what a share of it leaves after the largest step was computed once.

Knows the largest step and what the allocator says of it; the arithmetic is in ``pool_bytes``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from services.engine.computing import AnyDecoder, record_graphs
from services.engine.config import EngineConfig
from services.engine.kernels.base import Kernels
from services.engine.limits import EngineLimits
from services.engine.model.config import ModelConfig
from services.engine.placement import Placement
from services.engine.ranks import LeadKernels
from services.engine.request import SamplingParams
from services.engine.runner import ModelRunner, allocate_kv
from services.engine.sampler import Sampler
from services.engine.step import write_step
from services.engine.warm_up import largest_step

DRAWN = SamplingParams(temperature=1.0, top_p=0.9, seed=0)  # sorting the vocabulary takes the most memory


@dataclass(frozen=True, slots=True)
class BareRunner:
    """What a runner is made of, but for its pool."""

    decoder: AnyDecoder
    kernels: Kernels | LeadKernels
    sampler: Sampler
    placement: Placement


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Bytes of one GPU."""

    total: int
    outside: int
    """Taken by others: other processes, the driver's own for this one."""
    peak: int
    """This process' tensors at the peak of the largest step: weights and activations, without KV."""
    graphs: int = 0
    """What recorded decode steps keep beside them."""


def pool_bytes(use: GpuUse, utilization: float) -> int:
    """What remains for the pool.

    Raises:
        ValueError: nothing; the message has the figures.
    """
    left = int(use.total * utilization) - use.outside - use.peak - use.graphs
    if left <= 0:
        raise ValueError(
            f"gpu_memory_utilization is {utilization}; of {use.total} bytes, {use.outside} are taken by others, and "
            f"weights and activations of the largest step need {use.peak}, and graphs {use.graphs}: nothing is left "
            "for the KV pool"
        )
    return left


def measure(part: ModelConfig, context: int, config: EngineConfig, bare: BareRunner) -> GpuUse:
    """Compute the largest step on the current GPU, over a pool that only it needs, and see what that took."""
    device = bare.placement.device
    torch.cuda.reset_peak_memory_stats(device)
    pool_size = run_largest_step(part, context, config, bare)
    peak = torch.cuda.max_memory_allocated(device) - pool_size
    torch.cuda.empty_cache()
    graphs = _graph_bytes(part, config, bare)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return GpuUse(total, outside=total - free - torch.cuda.memory_reserved(device), peak=peak, graphs=graphs)


def _graph_bytes(part: ModelConfig, config: EngineConfig, bare: BareRunner) -> int:
    """What the largest recorded step keeps, and so all of them, since they share its memory."""
    placement = bare.placement
    before = torch.cuda.memory_reserved(placement.device)
    null_block = allocate_kv(part, 0, config.block_size, placement.kv_dtype, placement.device)  # padding's place
    record_graphs(bare.decoder, null_block, most=1)
    taken = torch.cuda.memory_reserved(placement.device) - before
    record_graphs(bare.decoder, null_block, most=0)  # forgets it
    return taken


def run_largest_step(part: ModelConfig, context: int, config: EngineConfig, bare: BareRunner) -> int:
    """Compute as many tokens and sequences as a step may have, every row drawn by a sort; bytes of the pool it had.

    Raises:
        RuntimeError: a row could not be drawn.
    """
    size = config.block_size
    room = config.max_num_seqs * context  # the pool is made for this step alone
    limits = EngineLimits(context, room, part.vocab_size, part.eos_token_ids)
    requests = largest_step(limits, config.max_num_seqs, config.max_num_batched_tokens, size)
    block_count = 0
    for request in requests:
        request.sampling = DRAWN
        blocks = -(-request.prompt_count // size)
        request.block_table.extend(np.arange(block_count + 1, block_count + 1 + blocks, dtype=np.int32))
        block_count += blocks
    kv = allocate_kv(part, block_count, size, bare.placement.kv_dtype, bare.placement.device)
    runner = ModelRunner(bare.decoder, bare.kernels, bare.sampler, kv, bare.placement.dtype)
    step = write_step(requests, [request.prompt_count for request in requests], size, now=0)
    for sampled in runner.launch(step)().sampled:
        if sampled is None or sampled.error is not None:
            raise RuntimeError(f"the largest step failed: {sampled and sampled.error}")
    return sum(layer.nbytes for layer in kv)
