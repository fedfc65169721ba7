"""Where an engine computes, and in which numbers: decided once from settings, model and machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.engine.config import EngineConfig
from services.engine.kernels import can_pack, native, triton
from services.engine.model.config import ModelConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Placement:
    """A device, the kernels for it, and the number formats of weights and KV."""

    device: torch.device
    kernels: str
    """cpu, torch, reference or triton."""
    dtype: torch.dtype
    """Of weights and activations."""
    kv_dtype: torch.dtype
    """Of the KV pool: the same, or int8."""

    @classmethod
    def choose(cls, config: EngineConfig, model: ModelConfig, rank: int = 0) -> Placement:
        """What the settings ask for; auto: a CUDA device if there is one and nothing asked for needs the CPU.

        Raises:
            ValueError: it is not to be had here; names the field.
        """
        device = _device(config, rank)
        kernels = config.kernels
        if kernels == "auto":
            kernels = "triton" if device.type == "cuda" else "cpu"
        if kernels == "triton" and (reason := triton.unusable(device)) is not None:
            raise ValueError(f"kernels is 'triton'; {reason}")
        dtype = _dtype(config, model.dtype, device, kernels)
        return cls(device, kernels, dtype, _kv_dtype(config, model) or dtype)


def _device(config: EngineConfig, rank: int) -> torch.device:
    there = torch.cuda.is_available()
    if config.device == "cuda" and not there:
        raise ValueError("device is 'cuda'; torch finds no CUDA device here")
    wants_cpu = config.deterministic or config.quantization != "none" or config.kernels not in ("auto", "triton")
    if config.device == "cpu" or not there or (config.device == "auto" and wants_cpu):
        return torch.device("cpu")
    if config.tensor_parallel > torch.cuda.device_count():
        raise ValueError(
            f"tensor_parallel is {config.tensor_parallel}; there are {torch.cuda.device_count()} CUDA devices here"
        )
    return torch.device("cuda", rank)


def _kv_dtype(config: EngineConfig, model: ModelConfig) -> torch.dtype | None:
    """Of the pool, where it is not that of all else."""
    if config.kv_cache_dtype == "auto":
        return None
    if model.head_dim % 4:
        raise ValueError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}; it needs a head_dim in fours, and the model's is "
            f"{model.head_dim}"
        )
    return torch.int8


def _dtype(config: EngineConfig, saved: str, device: torch.device, kernels: str) -> torch.dtype:
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if config.quantization != "none":
        return torch.bfloat16
    return torch.bfloat16 if saved == "bfloat16" and _has_bfloat16(config, device, kernels) else torch.float32


def _has_bfloat16(config: EngineConfig, device: torch.device, kernels: str) -> bool:
    """True where products of bfloat16 are fast: in hardware, or in the extension, which widens it as it goes."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    if can_pack(torch.bfloat16):
        return True
    alone = kernels == "cpu" and not config.deterministic and config.tensor_parallel == 1
    return alone and native.load() is None
