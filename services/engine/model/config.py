"""What config.json and generation_config.json say, checked field by field.

Knows no tensors. Every complaint is a ModelError that names the file, the field and what was expected.

    RuntimeError
    └── ModelError      the model directory cannot be served
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.models.families import FAMILIES, Family


class ModelError(RuntimeError):
    """The model directory cannot be served; the message names the file and what was expected in it."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary positions: plain, ``linear`` (positions divided by factor) or ``llama3`` (by wavelength)."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama-family decoder's shape."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    context_length: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    dtype: str
    """float32, bfloat16 or float16: what the weights were saved as."""
    eos_token_ids: frozenset[int]


class _Fields:
    """Typed reading of one JSON object; remembers the file for complaints."""

    def __init__(self, path: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self.prefix = prefix

    def fail(self, name: str, expected: str) -> ModelError:
        value = self.values.get(name)
        found = "it is missing" if name not in self.values else f"found {json.dumps(value)[:80]}"
        return ModelError(f"{self.path}: field {self.prefix}{name} must be {expected}; {found}")

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if value is None and default is not None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fail(name, "a positive integer")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.fail(name, "a positive number")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value


def load_config(model_dir: Path) -> ModelConfig:
    """Read and check a model directory's configuration.

    Raises:
        ModelError: naming the file and field.
    """
    if not model_dir.is_dir():
        raise ModelError(f"{model_dir}: no such directory; a Hugging Face model directory was expected")
    path = model_dir / "config.json"
    fields = _Fields(path, _read_json(path))
    family = _family(fields)
    heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.fail("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    hidden = fields.integer("hidden_size")
    if fields.values.get("head_dim") is None and hidden % heads:
        raise fields.fail("hidden_size", f"a multiple of num_attention_heads ({heads}) when head_dim is unset")
    head_dim = fields.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.fail("head_dim", "even")
    if fields.values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise fields.fail("hidden_act", '"silu"')
    if fields.flag("mlp_bias", default=False):
        raise fields.fail("mlp_bias", "false: biases in the feed-forward layers are not supported")
    if fields.values.get("quantization_config") is not None:
        raise fields.fail("quantization_config", "absent: quantised weights are not supported")
    bias = family.config_bias and fields.flag("attention_bias", default=False)
    vocab_size = fields.integer("vocab_size")
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        layer_count=fields.integer("num_hidden_layers"),
        head_count=heads,
        kv_head_count=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        context_length=_context(fields, family),
        tied_embeddings=fields.flag("tie_word_embeddings", default=False),
        qkv_bias=family.qkv_bias or bias,
        output_bias=bias,
        dtype=_dtype(fields),
        eos_token_ids=_eos(model_dir, fields, vocab_size),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: the file is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: a JSON object was expected")
    return value


def _family(fields: _Fields) -> Family:
    architectures = fields.values.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise fields.fail("architectures", f"a list that starts with one of {', '.join(sorted(FAMILIES))}")
    return FAMILIES[name]


def _context(fields: _Fields, family: Family) -> int:
    context = fields.integer("max_position_embeddings")
    if family.sliding_window and fields.values.get("sliding_window") is not None:
        return min(context, fields.integer("sliding_window"))
    if fields.values.get("use_sliding_window"):
        raise fields.fail("use_sliding_window", "false: sliding windows by layer are not supported")
    return context


def _rope(fields: _Fields) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (before)."""
    name = "rope_parameters" if fields.values.get("rope_parameters") else "rope_scaling"
    values = fields.values.get(name) or {}
    if not isinstance(values, dict):
        raise fields.fail(name, "an object")
    rope = _Fields(fields.path, values, prefix=f"{name}.")
    theta_from = rope if "rope_theta" in values else fields
    theta = theta_from.number("rope_theta", 10000.0)
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, rope.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta,
            kind,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context=rope.integer("original_max_position_embeddings"),
        )
    raise rope.fail("rope_type", "one of default, linear, llama3")


def _dtype(fields: _Fields) -> str:
    name = "dtype" if "dtype" in fields.values else "torch_dtype"
    value = fields.values.get(name) or "float32"
    if value not in ("float32", "bfloat16", "float16"):
        raise fields.fail(name, "float32, bfloat16 or float16")
    return str(value)


def _eos(model_dir: Path, fields: _Fields, vocab_size: int) -> frozenset[int]:
    """End-of-sequence ids: generation_config.json's when it has any, else config.json's."""
    path = model_dir / "generation_config.json"
    sources = [fields]
    if path.exists():
        sources.insert(0, _Fields(path, _read_json(path)))
    for source in sources:
        value = source.values.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise source.fail("eos_token_id", f"token ids below the vocabulary size ({vocab_size})")
        return frozenset(ids)
    return frozenset()
