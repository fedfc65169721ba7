"""Unpacks tensors and writes them as safetensors, a bounded number of bytes at a time.

Knows packing and files; which tensors there are and what they mean is said by the caller.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from headrace.models.gguf.file import GgufFile, TensorInfo

if TYPE_CHECKING:
    from headrace.models.gguf.config import Wanted

SHARD_BYTES = 4 << 30  # a shard is held in memory while it is written
_CHUNK_VALUES = 1 << 24  # unpacked at once, as float32


def read_tensor(path: Path, info: TensorInfo, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return one tensor unpacked, in the file's own order of rows."""
    rows = math.prod(info.shape[:-1])
    packed = np.memmap(path, np.uint8, mode="r", offset=info.start, shape=(rows, info.row_bytes))
    unpacked = torch.empty((rows, info.shape[-1]), dtype=dtype)
    step = max(1, _CHUNK_VALUES // info.shape[-1])
    for start in range(0, rows, step):
        with np.errstate(all="ignore"):  # what comes of damaged bytes is for the caller to judge
            values = gguf.dequantize(np.array(packed[start : start + step]), info.kind)
        unpacked[start : start + step] = torch.from_numpy(np.ascontiguousarray(values))
    return unpacked.view(info.shape)


def halves_from_pairs(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Put the rows of each head from pairs of the rotation (r0 i0 r1 i1 ...) into halves (r0 r1 ... i0 i1 ...)."""
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def write_weights(
    file: GgufFile,
    wanted: Sequence[Wanted],
    directory: Path,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write model.safetensors, or numbered shards and their index where one file would exceed `shard_bytes`.

    Raises:
        ImportFailed: a tensor holds infinities or what is no number.
    """
    shards = _shards(wanted, dtype.itemsize, shard_bytes)
    weight_map: dict[str, str] = {}
    for place, shard in enumerate(shards, start=1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{place:05d}-of-{len(shards):05d}.safetensors"
        save_file({one.name: _convert(file, one, dtype) for one in shard}, directory / name, {"format": "pt"})
        weight_map |= {one.name: name for one in shard}
    if len(shards) > 1:
        total = sum(math.prod(one.shape) for one in wanted) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _convert(file: GgufFile, one: Wanted, dtype: torch.dtype) -> torch.Tensor:
    tensor = read_tensor(file.path, file.tensors[one.source], dtype)
    if not bool(torch.isfinite(tensor).all()):
        raise file.fail(f"is damaged: tensor {one.source} holds values that are no finite numbers; fetch it again.")
    return halves_from_pairs(tensor, one.heads) if one.heads else tensor


def _shards(wanted: Sequence[Wanted], item_bytes: int, limit: int) -> list[list[Wanted]]:
    shards: list[list[Wanted]] = [[]]
    used = 0
    for one in wanted:
        size = math.prod(one.shape) * item_bytes
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(one)
        used += size
    return shards
