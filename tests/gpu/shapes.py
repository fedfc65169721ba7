"""Models of well-known shapes with random weights, written to disk on the spot: nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.engine.model.config import ModelConfig, load_config
from services.engine.model.weights import expected_tensors
from tests.engine.factories import tiny_config

STANDARD_DEVIATION = 0.02
_COMMON = {"torch_dtype": "bfloat16", "head_dim": 128, "max_position_embeddings": 8192}
LLAMA_3_8B = tiny_config(
    **_COMMON,
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    rope_theta=500_000.0,
)
QWEN3_0_6B = tiny_config(
    "Qwen3ForCausalLM",
    **_COMMON,
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    rope_theta=1_000_000.0,
    tie_word_embeddings=True,
    use_sliding_window=False,
)


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The same kind of model in a size that an interpreter can compute."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    return {**config, **{name: tiny_config()[name] for name in sizes}, "num_hidden_layers": 1}


def write_random_model(path: Path, config: dict[str, Any], device: torch.device) -> Path:
    """A model directory with a file for each layer; numbers are drawn on the device."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator(device).manual_seed(0)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(_files(load_config(path))):
        file = f"model-{number}.safetensors"
        tensors = {name: _drawn(name, shape, generator) for name, shape in names}
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= {name: file for name, _ in names}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def _files(model: ModelConfig) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """Tensors that share a file: those of a layer; what is in none."""
    ordered = sorted(expected_tensors(model).items(), key=lambda item: _layer(item[0]))
    for _, members in groupby(ordered, key=lambda item: _layer(item[0])):
        yield list(members)


def _layer(name: str) -> int:
    return int(name.split(".")[2]) if ".layers." in name else -1


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    drawn = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)
    return drawn.mul_(STANDARD_DEVIATION).to("cpu", torch.bfloat16)


@dataclass(frozen=True)
class Work:
    """What a step of a model costs at least."""

    model: ModelConfig

    @property
    def layer_weights(self) -> int:
        """Numbers in the products of all layers."""
        m = self.model
        attention = m.hidden_size * m.head_dim * (2 * m.head_count + 2 * m.kv_head_count)
        return m.layer_count * (attention + 3 * m.hidden_size * m.intermediate_size)

    def decode_bytes(self, sequences: int, context: float) -> float:
        """Read once: weights of layers and head, keys and values of every sequence; in bfloat16."""
        m = self.model
        weights = self.layer_weights + m.vocab_size * m.hidden_size
        kv = 2 * m.layer_count * m.kv_head_count * m.head_dim
        return 2.0 * (weights + sequences * context * kv)

    def prefill_operations(self, tokens: int) -> float:
        """Multiplications and additions for a prompt, causal attention and one row of the head included."""
        m = self.model
        attention = 2.0 * m.layer_count * m.head_count * m.head_dim * tokens * tokens
        return 2.0 * self.layer_weights * tokens + attention + 2.0 * m.vocab_size * m.hidden_size
