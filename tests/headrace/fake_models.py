"""Tiny model directories, written without torch: headers and JSON are all that the store reads."""

import json
import struct
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "vocab_size": 16,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "max_position_embeddings": 128,
}


def write_model(directory: Path, weights_cut_bytes: int = 0, **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    (directory / "tokenizer.json").write_text("{}")
    write_weights(directory / "model.safetensors", cut_bytes=weights_cut_bytes)
    return directory


def write_weights(file: Path, cut_bytes: int = 0) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [16, 4], "data_offsets": [0, 128]}}).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(128)
    file.write_bytes(whole[: len(whole) - cut_bytes])
