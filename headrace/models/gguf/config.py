"""What a GGUF file's metadata and tensor names say of the model, as config.json and a list of tensors.

Knows names and shapes; reads no weights (but the rotary divisors, which stand for configuration).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.models.families import FAMILIES, Family
from headrace.models.gguf import rope
from headrace.models.gguf.file import GgufFile
from headrace.models.gguf.weights import read_tensor

_ROPE_FACTORS = "rope_freqs.weight"
_IGNORED = ("attn_rot_embd.weight",)  # frequencies that follow from the configuration


@dataclass(frozen=True, slots=True)
class Wanted:
    """One tensor of the result."""

    name: str  # as Hugging Face calls it
    source: str  # as GGUF calls it
    shape: tuple[int, ...]
    heads: int = 0  # the rows are pairs of the rotation of so many heads and must be put back into halves


@dataclass(frozen=True, slots=True)
class _Shape:
    """The sizes that tensor shapes follow from."""

    vocab: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int


def read_config(file: GgufFile) -> tuple[dict[str, Any], list[Wanted]]:
    """Return config.json's content, without dtype and token ids, and the tensors that belong to it.

    Raises:
        ImportFailed: an unknown architecture, missing metadata, or tensors that do not fit it.
    """
    family = _family(file)
    shape = _shape(file, family)
    bias = family.config_bias and "blk.0.attn_q.bias" in file.tensors
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": file.number(f"{family.gguf}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": file.integer(f"{family.gguf}.context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        **_rope(file, family, shape.head_dim),
    }
    if family.config_bias:
        config["attention_bias"] = bias
    if family.sliding_window:
        config["sliding_window"] = file.integer(f"{family.gguf}.attention.sliding_window")
    wanted = _wanted(family, shape, bias=bias, tied=config["tie_word_embeddings"])
    return config, _check(file, family, wanted)


def _family(file: GgufFile) -> Family:
    name = file.text("general.architecture")
    windowed = f"{name}.attention.sliding_window" in file.metadata
    rows = [family for family in FAMILIES.values() if family.gguf == name]
    if not rows:
        known = ", ".join(dict.fromkeys(family.gguf for family in FAMILIES.values()))
        raise file.fail(f"is of architecture {name!r}; expected one of {known}.")
    return next((family for family in rows if family.sliding_window == windowed), rows[0])


def _shape(file: GgufFile, family: Family) -> _Shape:
    prefix = family.gguf
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise file.fail("lacks the tensor token_embd.weight; expected a whole language model.")
    hidden = file.integer(f"{prefix}.embedding_length")
    heads = file.integer(f"{prefix}.attention.head_count")
    kv_heads = file.integer(f"{prefix}.attention.head_count_kv", heads)
    rotated = file.integer(f"{prefix}.rope.dimension_count", hidden // heads)
    head_dim = file.integer(f"{prefix}.attention.key_length", rotated)
    if f"{prefix}.rope.dimension_count" in file.metadata and rotated != head_dim:
        raise file.fail(f"rotates {rotated} of {head_dim} dimensions of a head; expected all of them.")
    if heads % kv_heads or head_dim % 2 or file.integer(f"{prefix}.attention.value_length", head_dim) != head_dim:
        raise file.fail(
            f"has {heads} heads, {kv_heads} key/value heads and heads of {head_dim} dimensions; expected a "
            "divisor, an even number, and the same for keys and values."
        )
    layers = file.integer(f"{prefix}.block_count")
    if f"blk.{layers - 1}.attn_norm.weight" not in file.tensors:
        raise file.fail(f"lacks the tensor blk.{layers - 1}.attn_norm.weight; expected {layers} layers.")
    return _Shape(
        vocab=embedding.shape[0],
        hidden=hidden,
        inner=file.integer(f"{prefix}.feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )


def _rope(file: GgufFile, family: Family, head_dim: int) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`."""
    prefix = f"{family.gguf}.rope"
    theta = file.number(f"{prefix}.freq_base", 10000.0)
    kind = file.metadata.get(f"{prefix}.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise file.fail(f"scales rotary positions by {kind!r}; expected none, linear or Llama 3's divisors.")
    scaling: dict[str, Any] | None = None
    if _ROPE_FACTORS in file.tensors:
        info = file.tensors[_ROPE_FACTORS]
        found = read_tensor(file.path, info).numpy().reshape(-1).astype(np.float64)
        scaling = rope.recover(found, theta) if kind == "none" and len(found) == head_dim // 2 else None
        if scaling is None:
            raise file.fail(f"has rotary divisors ({_ROPE_FACTORS}) that are not Llama 3's scaling; expected those.")
    elif kind == "linear":
        scaling = {"rope_type": "linear", "factor": file.number(f"{prefix}.scaling.factor")}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _wanted(family: Family, shape: _Shape, *, bias: bool, tied: bool) -> list[Wanted]:
    hidden, inner, dim = shape.hidden, shape.inner, shape.head_dim
    queries, keys = shape.heads * dim, shape.kv_heads * dim
    q_pairs, k_pairs = (shape.heads, shape.kv_heads) if family.gguf_permuted else (0, 0)
    wanted = [Wanted("model.embed_tokens.weight", "token_embd.weight", (shape.vocab, hidden))]
    for layer in range(shape.layers):
        to, source = f"model.layers.{layer}.", f"blk.{layer}."
        attention = to + "self_attn."
        wanted += [
            Wanted(to + "input_layernorm.weight", source + "attn_norm.weight", (hidden,)),
            Wanted(attention + "q_proj.weight", source + "attn_q.weight", (queries, hidden), q_pairs),
            Wanted(attention + "k_proj.weight", source + "attn_k.weight", (keys, hidden), k_pairs),
            Wanted(attention + "v_proj.weight", source + "attn_v.weight", (keys, hidden)),
            Wanted(attention + "o_proj.weight", source + "attn_output.weight", (hidden, queries)),
            Wanted(to + "post_attention_layernorm.weight", source + "ffn_norm.weight", (hidden,)),
            Wanted(to + "mlp.gate_proj.weight", source + "ffn_gate.weight", (inner, hidden)),
            Wanted(to + "mlp.up_proj.weight", source + "ffn_up.weight", (inner, hidden)),
            Wanted(to + "mlp.down_proj.weight", source + "ffn_down.weight", (hidden, inner)),
        ]
        if family.qkv_bias or bias:
            wanted += [
                Wanted(attention + "q_proj.bias", source + "attn_q.bias", (queries,), q_pairs),
                Wanted(attention + "k_proj.bias", source + "attn_k.bias", (keys,), k_pairs),
                Wanted(attention + "v_proj.bias", source + "attn_v.bias", (keys,)),
            ]
        if bias:
            wanted.append(Wanted(attention + "o_proj.bias", source + "attn_output.bias", (hidden,)))
        if family.qk_norm:
            wanted += [
                Wanted(attention + "q_norm.weight", source + "attn_q_norm.weight", (dim,)),
                Wanted(attention + "k_norm.weight", source + "attn_k_norm.weight", (dim,)),
            ]
    wanted.append(Wanted("model.norm.weight", "output_norm.weight", (hidden,)))
    if not tied:
        wanted.append(Wanted("lm_head.weight", "output.weight", (shape.vocab, hidden)))
    return wanted


def _check(file: GgufFile, family: Family, wanted: list[Wanted]) -> list[Wanted]:
    """Compare names and shapes with the file's."""
    for one in wanted:
        info = file.tensors.get(one.source)
        if info is None:
            raise file.fail(f"lacks the tensor {one.source}; expected every tensor of a {family.gguf} model.")
        if info.shape != one.shape:
            raise file.fail(f"has tensor {one.source} of shape {info.shape}; its metadata promises {one.shape}.")
    known = {one.source for one in wanted} | {_ROPE_FACTORS}
    for name in file.tensors:
        if name not in known and not name.endswith(_IGNORED):
            raise file.fail(f"has a tensor {name}; expected only those of a dense {family.gguf} model.")
    return wanted
