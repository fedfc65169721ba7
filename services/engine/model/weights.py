"""Tensors from safetensors files, each checked by name and shape before any is used.

Knows files and names; nothing of how the decoder computes. Every complaint is a ModelError that names the file
and the tensor.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.engine.model.config import ModelConfig, ModelError
from services.engine.model.shard import HEAD, Shard

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = ("F32", "BF16", "F16")


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.head_count * config.head_dim
    keys = config.kv_head_count * config.head_dim
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        expected["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.layer_count):
        prefix = f"model.layers.{layer}."
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (queries, hidden),
            "self_attn.k_proj.weight": (keys, hidden),
            "self_attn.v_proj.weight": (keys, hidden),
            "self_attn.o_proj.weight": (hidden, queries),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if config.qkv_bias:
            shapes["self_attn.q_proj.bias"] = (queries,)
            shapes["self_attn.k_proj.bias"] = (keys,)
            shapes["self_attn.v_proj.bias"] = (keys,)
        if config.output_bias:
            shapes["self_attn.o_proj.bias"] = (hidden,)
        if config.family.qk_norm:
            shapes["self_attn.q_norm.weight"] = (config.head_dim,)
            shapes["self_attn.k_norm.weight"] = (config.head_dim,)
        expected.update({prefix + name: shape for name, shape in shapes.items()})
    return expected


class WeightReader:
    """Reads checked tensors of one model directory, one at a time: of each, a rank's part."""

    def __init__(
        self,
        model_dir: Path,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device | None = None,
        shard: Shard | None = None,
    ) -> None:
        """Check names, shapes and files, reading headers only. Tensors come to ``device``; None: the CPU.

        Raises:
            ModelError: a tensor is missing, unexpected or misshaped, or a file is broken.
        """
        self._dtype = dtype
        self.device = device or torch.device("cpu")
        self.shard = shard or Shard()
        self._expected = expected_tensors(config)
        self._files = _locate(model_dir)
        self._check(model_dir, tied=config.tied_embeddings)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, contiguous, in the engine's dtype, on its device."""
        path = self._files[name]
        place = self.shard.place(name, self._expected[name])
        with _opened(path) as handle:
            try:
                tensor: torch.Tensor = handle.get_slice(name)[place] if place else handle.get_tensor(name)
            except (SafetensorError, RuntimeError, ValueError) as error:
                raise ModelError(f"{path}: tensor {name} is not readable: {error}") from error
        if self.shard.is_elsewhere(name):
            tensor = torch.zeros_like(tensor)
        return tensor.to(self.device, self._dtype).contiguous()

    def read_head(self, embedding: torch.Tensor, *, tied: bool) -> torch.Tensor:
        """The head's weight; part of the embedding where they are one tensor."""
        if not tied:
            return self.read(HEAD)
        place = self.shard.place(HEAD, tuple(embedding.shape))
        return embedding[place] if place else embedding

    def join(self, *names: str) -> torch.Tensor:
        """Several tensors, one under the other."""
        return torch.cat([self.read(name) for name in names])

    def _check(self, model_dir: Path, *, tied: bool) -> None:
        ignored = {"lm_head.weight"} if tied else set()
        missing = [name for name in self._expected if name not in self._files]
        if missing:
            raise ModelError(
                f"{model_dir}: tensor {missing[0]} is missing ({len(missing)} missing in all); the weights do "
                "not belong to this config.json or are incomplete"
            )
        for name, path in self._files.items():
            known = name in self._expected or name in ignored or name.endswith("rotary_emb.inv_freq")
            if not known:
                raise ModelError(f"{path}: tensor {name} is unexpected for this config.json")
        for path in sorted(set(self._files.values())):
            self._check_file(path)

    def _check_file(self, path: Path) -> None:
        with _opened(path) as handle:
            present = set(handle.keys())
            for name, shape in self._expected.items():
                if self._files[name] != path:
                    continue
                if name not in present:
                    raise ModelError(f"{path}: tensor {name} is missing; the index says it is here")
                part = handle.get_slice(name)
                found = tuple(part.get_shape())
                if found != shape:
                    raise ModelError(f"{path}: tensor {name} has shape {found}; {shape} was expected")
                if part.get_dtype() not in _FLOATS:
                    raise ModelError(
                        f"{path}: tensor {name} is of type {part.get_dtype()}; one of {', '.join(_FLOATS)} was expected"
                    )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        handle = safe_open(path, framework="pt")
    except FileNotFoundError:
        raise ModelError(f"{path}: the file is missing") from None
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path}: broken or truncated safetensors file: {error}") from error
    with handle as opened:
        yield opened


def _locate(model_dir: Path) -> dict[str, Path]:
    """The file of each tensor, from the index when there is one."""
    index = model_dir / _INDEX
    single = model_dir / _SINGLE
    if not index.exists():
        if not single.exists():
            raise ModelError(f"{model_dir}: neither {_SINGLE} nor {_INDEX} is there")
        with _opened(single) as handle:
            return dict.fromkeys(handle.keys(), single)
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): model_dir / str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index}: an object with a weight_map of file names was expected") from error
