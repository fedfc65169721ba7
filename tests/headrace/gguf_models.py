"""Tiny random models of each family, and GGUF files of them written with the `gguf` package's own writer."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# name → (model_type, GGUF architecture, differences from the base)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "llama3": ("llama", "llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": (
        "llama",
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama-bias": ("llama", "llama", {"attention_bias": True}),
    "mistral": ("mistral", "llama", {"sliding_window": None, "head_dim": 128}),
    "mistral-window": ("mistral", "llama", {"sliding_window": 64}),
    "qwen2": ("qwen2", "qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-tied": ("qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 128}),
}
BASE: dict[str, Any] = {
    "vocab_size": 288,
    "hidden_size": 256,  # a row must be whole blocks of 256 for K-quants
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 259,
    "eos_token_id": 260,
    "pad_token_id": None,
}
# Bytes of a block, where its 16-bit factors lie, and values for them that give weights of about 0.1.
K_BLOCKS: dict[Kind, tuple[int, dict[int, float]]] = {
    Kind.Q2_K: (84, {80: 0.01, 82: 0.015}),
    Kind.Q3_K: (110, {108: 2e-3}),
    Kind.Q4_K: (144, {0: 3e-4, 2: 2.2e-3}),
    Kind.Q5_K: (176, {0: 1.5e-4, 2: 2.2e-3}),
    Kind.Q6_K: (210, {208: 5e-5}),
}
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def tiny_model(family: str, **changes: Any) -> Any:
    """A random float32 model of `transformers`."""
    model_type, _, differences = FAMILIES[family]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**BASE, **differences, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape)
            tensor.copy_(1 + 0.1 * noise if name.endswith("norm.weight") else 0.1 * noise)
    return model


def pack(tensor: np.ndarray[Any, Any], kind: Kind) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Bytes of a matrix in `kind`, and the values that they stand for; K-quants get random blocks."""
    if kind not in K_BLOCKS:
        packed = gguf.quantize(tensor, kind)
        return packed, gguf.dequantize(packed, kind)
    size, factors = K_BLOCKS[kind]
    rng = np.random.default_rng(math.prod(tensor.shape))
    blocks = rng.integers(0, 256, (tensor.size // 256, size), dtype=np.uint8)
    for place, value in factors.items():
        blocks[:, place : place + 2] = np.array([value], np.float16).view(np.uint8)
    packed = blocks.reshape(tensor.shape[0], -1)
    return packed, gguf.dequantize(packed, kind)


def write_gguf(
    path: Path,
    model: Any,
    family: str,
    kind: Kind = Kind.F32,
    metadata: Mapping[str, Any] | None = None,
    drop: tuple[str, ...] = (),
) -> dict[str, torch.Tensor]:
    """Write `model` in the manner of llama.cpp; return the weights that the file stands for, as the model has them.

    `metadata` is added to, or replaces, the usual keys (None removes one); `drop` names tensors to leave out.
    """
    architecture = FAMILIES[family][1]
    config = model.config
    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_metadata(config, architecture), **tokenizer_metadata(), **(metadata or {})}.items():
        _add(writer, key, value)
    stands_for = {}
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = str(names.get_name(hf_name, try_suffixes=(".weight", ".bias")))
        heads = _pair_heads(config, architecture, name)
        values = pairs_from_halves(tensor.numpy(), heads)
        if values.ndim == 1:
            packed, unpacked, stored = values, values, Kind.F32
        else:
            (packed, unpacked), stored = pack(values, kind), kind
        if name not in drop:
            writer.add_tensor(name, packed, raw_dtype=None if stored is Kind.F32 else stored)
        stands_for[hf_name] = torch.from_numpy(halves_from_pairs(np.array(unpacked), heads))
    if (config.rope_parameters or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if config.tie_word_embeddings:
        stands_for["lm_head.weight"] = stands_for["model.embed_tokens.weight"]
    return stands_for


def tokenizer_metadata() -> dict[str, Any]:
    """A byte-level tokenizer: 256 bytes, three joined pairs, two control tokens, one plain added one, padding."""
    joined = ["he", "ll", "Ġhe"]
    tokens = [*ALPHABET, *joined, "<|begin|>", "<|end|>", "<tool>", *(f"[PAD{place}]" for place in range(262, 288))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 259 + [3, 3, 4] + [5] * 26,
        "tokenizer.ggml.merges": ["h e", "l l", "Ġ he"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 260,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }


def pairs_from_halves(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to the rows of llama's queries and keys."""
    if not heads:
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def halves_from_pairs(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    if not heads:
        return values
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)


def _pair_heads(config: Any, architecture: str, name: str) -> int:
    if architecture != "llama" or not (".attn_q." in name or ".attn_k." in name):
        return 0
    return int(config.num_attention_heads if ".attn_q." in name else config.num_key_value_heads)


def _metadata(config: Any, architecture: str) -> dict[str, Any]:
    rope = config.rope_parameters
    keys: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim != config.hidden_size // config.num_attention_heads:
        keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if architecture == "llama":
        keys["rope.dimension_count"] = head_dim
    if rope["rope_type"] == "linear":
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if config.model_type == "mistral" and config.sliding_window:
        keys["attention.sliding_window"] = config.sliding_window
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if key == "general.architecture":  # the writer has one already
        writer.kv_data[0][key].value = value
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _rope_divisors(config: Any) -> np.ndarray[Any, Any]:
    """Llama 3's scaling as llama.cpp's converter writes it, one frequency at a time."""
    rope = config.rope_parameters
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    context, factor = rope["original_max_position_embeddings"], rope["factor"]
    divisors = []
    for place in range(0, config.head_dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (place / config.head_dim)
        if wavelength < context / high:
            divisors.append(1.0)
        elif wavelength > context / low:
            divisors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)
