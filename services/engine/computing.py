"""Chooses what computes a model: kernels and the decoder that fits them. Knows settings and shapes; no requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch

from services.engine.config import EngineConfig
from services.engine.kernels import CpuKernels, DeterministicKernels, Kernels, ReferenceKernels, native
from services.engine.model.config import ModelConfig
from services.engine.model.decoder import Decoder
from services.engine.model.native import NativeDecoder
from services.engine.model.shard import Shard
from services.engine.model.weights import WeightReader
from services.engine.native_sampler import NativeSampler
from services.engine.placement import Placement
from services.engine.ranks import LeadDecoder, LeadKernels, Ranks, join
from services.engine.sampler import Sampler

if TYPE_CHECKING:
    from services.engine.model.graphs import GraphedDecoder

AnyDecoder: TypeAlias = "Decoder | NativeDecoder | LeadDecoder | GraphedDecoder"


def make_decoder(
    config: EngineConfig, model: ModelConfig, placement: Placement, length: int
) -> tuple[AnyDecoder, Kernels | LeadKernels]:
    """Read the weights into the decoder that is fastest here for what the configuration asks for.

    The extension computes bfloat16 and int8 alone, on one rank: float32, deterministic mode, ``torch`` and tensor
    parallelism stay with torch's operators, and so does bfloat16 where it cannot be built.

    Raises:
        ValueError: int8 is asked for and the extension cannot compute it here; says why.
    """
    if config.tensor_parallel > 1:
        return _lead(config, model, placement, length)
    reader = WeightReader(config.model_dir, model, placement.dtype, placement.device)
    quantised = config.quantization != "none"
    why_not = _why_not_native(config, model, placement)
    if why_not is None:
        return NativeDecoder(model, reader, length, quantised=quantised), native.NativeKernels()
    if quantised:
        raise ValueError(f"quantization is {config.quantization!r}; it needs the C++ extension, and {why_not}")
    kernels = make_kernels(config, model, placement)
    decoder = Decoder(model, reader, kernels, placement.dtype, length)
    if placement.device.type != "cuda" or not config.cuda_graphs:
        return decoder, kernels
    from services.engine.model.graphs import GraphedDecoder, graph_sizes  # as in make_kernels

    widest = -(-length // config.block_size)
    return GraphedDecoder(decoder, graph_sizes(config.max_num_seqs), widest, placement.device), kernels


def record_graphs(decoder: AnyDecoder, kv: list[torch.Tensor], most: int | None = None) -> None:
    """Record the decode steps of a decoder that has graphs, over its pool; with ``most`` the largest alone."""
    if kv[0].device.type == "cuda":
        from services.engine.model.graphs import CudaRecorder, GraphedDecoder

        if isinstance(decoder, GraphedDecoder):
            decoder.record(kv, CudaRecorder(kv[0].device), most)


def make_sampler(config: EngineConfig, model: ModelConfig, placement: Placement) -> Sampler:
    """The sampler that is fastest where the logits are."""
    if placement.kernels == "triton":
        from services.engine.device_sampler import DeviceSampler

        return DeviceSampler(model.eos_token_ids)
    if placement.kernels == "cpu" and not config.deterministic and native.load() is None:
        return NativeSampler(model.eos_token_ids)
    return Sampler(model.eos_token_ids)


def make_kernels(config: EngineConfig, model: ModelConfig, placement: Placement) -> Kernels:
    """The kernels of a ``Decoder``."""
    if placement.kernels == "triton":
        from services.engine.kernels.triton.kernels import TritonKernels  # needs the package triton

        return TritonKernels(placement.device, model.head_count // model.kv_head_count)
    if config.deterministic:
        return DeterministicKernels()
    return ReferenceKernels() if placement.kernels == "reference" else CpuKernels()


def make_part(
    config: EngineConfig, model: ModelConfig, placement: Placement, length: int, shard: Shard
) -> tuple[Decoder, Kernels]:
    """One rank's part of a decoder."""
    reader = WeightReader(config.model_dir, model, placement.dtype, placement.device, shard)
    kernels = make_kernels(config, model, placement)
    return Decoder(model, reader, kernels, placement.dtype, length), kernels


def _lead(
    config: EngineConfig, model: ModelConfig, placement: Placement, length: int
) -> tuple[LeadDecoder, LeadKernels]:
    shard = Shard(0, config.tensor_parallel)
    shard.check(model)
    ranks = Ranks(config, length)
    try:
        ranks.wait()
        join(0, shard.count, ranks.store, placement.device)
        decoder, kernels = make_part(config, model, placement, length, shard)
        ranks.wait()
    except BaseException:
        ranks.close()
        raise
    return LeadDecoder(decoder, ranks), LeadKernels(kernels)


def _why_not_native(config: EngineConfig, model: ModelConfig, placement: Placement) -> str | None:
    """Why the extension does not compute this; None if it does."""
    if placement.kernels != "cpu" or config.deterministic or placement.dtype is not torch.bfloat16:
        return "other kernels are asked for"
    sizes = {"head_dim": model.head_dim, "hidden": model.hidden_size, "inner": model.intermediate_size}
    if not native.fits(**sizes):
        return f"it has no kernels for a model of {sizes}"
    return native.load()
