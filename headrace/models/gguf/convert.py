"""The conversion: a GGUF file in, a Hugging Face style directory out. The plot of this folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from headrace.models.gguf.config import read_config
from headrace.models.gguf.file import GgufFile, read_header
from headrace.models.gguf.tokenizer import write_tokenizer
from headrace.models.gguf.weights import write_weights


def convert(gguf: Path, directory: Path, dtype: torch.dtype | None = None) -> None:
    """Write the model of `gguf` into the existing `directory`.

    Args:
        gguf: the file.
        directory: where to write.
        dtype: of the weights; by default float32 where the file holds nothing else, else bfloat16.

    Raises:
        ImportFailed: one sentence that names the file and what was expected of it.
    """
    file = read_header(gguf)
    config, wanted = read_config(file)
    ids = write_tokenizer(file, directory, config["vocab_size"])
    dtype = dtype or _dtype(file)
    write_weights(file, wanted, directory, dtype)
    _write_json(directory / "config.json", {**config, **ids, "dtype": str(dtype).removeprefix("torch.")})
    _write_json(directory / "generation_config.json", ids)


def _dtype(file: GgufFile) -> torch.dtype:
    packed = {info.kind.name for info in file.tensors.values()}
    return torch.float32 if packed == {"F32"} else torch.bfloat16


def _write_json(file: Path, content: dict[str, object]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
