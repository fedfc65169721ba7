"""Chooses what computes a model: kernels and the decoder that fits them. Knows settings and shapes; no requests."""

from __future__ import annotations

import torch

from services.engine.config import EngineConfig
from services.engine.kernels import CpuKernels, DeterministicKernels, Kernels, ReferenceKernels, native
from services.engine.model.config import ModelConfig
from services.engine.model.decoder import Decoder
from services.engine.model.native import NativeDecoder
from services.engine.model.weights import WeightReader


def make_decoder(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, length: int
) -> tuple[Decoder | NativeDecoder, Kernels]:
    """Read the weights into the decoder that is fastest here for what the configuration asks for.

    The extension computes bfloat16 alone: float32, deterministic mode and ``torch`` stay with torch's operators, and
    so does all else where it cannot be built.
    """
    reader = WeightReader(config.model_dir, model, dtype)
    if _wants_native(config, model, dtype) and native.load() is None:
        return NativeDecoder(model, reader, length), native.NativeKernels()
    kernels: Kernels = CpuKernels()
    if config.deterministic:
        kernels = DeterministicKernels()
    elif config.kernels == "reference":
        kernels = ReferenceKernels()
    return Decoder(model, reader, kernels, dtype, length), kernels


def _wants_native(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> bool:
    return (
        config.kernels == "cpu"
        and not config.deterministic
        and dtype is torch.bfloat16
        and native.fits(head_dim=model.head_dim, hidden=model.hidden_size, inner=model.intermediate_size)
    )
