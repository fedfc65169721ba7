"""Rotary position embeddings (Su et al., RoFormer, 2021), with Llama 3's scaling by wavelength."""

from __future__ import annotations

import math

import torch

from services.engine.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Angle a position for each pair of dimensions, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind != "llama3":
        return plain
    # Long wavelengths are slowed by the factor, short ones kept, those between are blended.
    wavelength = 2 * math.pi / plain
    turns = rope.original_context / wavelength
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * plain / rope.factor + blend * plain


def rotation_tables(
    rope: RopeConfig, head_dim: int, length: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines, each [length, 1, head_dim].

    The sine of the first half is negative, so that with the halves of x swapped the rotation is
    ``x * cos + swapped * sin``.
    """
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    cos = torch.cat([angles.cos(), angles.cos()], dim=-1)
    sin = torch.cat([-angles.sin(), angles.sin()], dim=-1)
    return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)
