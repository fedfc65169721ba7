"""What the engine's memory is made of, and how many KV blocks fit.

Knows the machine's memory files and a model's shape; allocates nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from services.engine.kernels.kv_int8 import SCALE_BYTES, row_width
from services.engine.model.config import ModelConfig

_UNKNOWN_BYTES = 4 << 30  # assumed where the system does not say


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """Bytes, by what they are for."""

    weight_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    kv_formula: str
    """The exact product behind ``kv_bytes_per_token``, for a log line."""
    block_count: int
    block_size: int
    peak_activation_bytes: int = 0
    """Tensors that live at the same time in the largest step, measured at warm-up; 0 before it."""


@dataclass(frozen=True, slots=True)
class HeapFacts:
    """What the C library's allocator holds for this whole process; 0 is unknown."""

    reserved_bytes: int = 0
    """Taken from the system."""
    allocated_bytes: int = 0
    """Of these, in use."""
    largest_free_bytes: int = 0
    """Largest block that could be had without asking the system: no CPU allocator says."""


@dataclass(frozen=True, slots=True)
class ResidentMemory:
    """What of a process is in RAM, in bytes; 0 is unknown."""

    total_bytes: int = 0
    file_bytes: int = 0
    """Pages of files: code of libraries, which the kernel can take back."""
    weight_bytes: int = 0
    kv_bytes: int = 0
    """The part of the pool that has been touched."""

    @classmethod
    def measure(cls, weight_bytes: int, pools: Sequence[tuple[int, int]], proc: Path = Path("/proc")) -> ResidentMemory:
        """Ask the kernel about this process.

        Args:
            weight_bytes: in use; all of them are in RAM.
            pools: address and bytes of each part of the KV pool in this process's memory.
            proc: where its files are.
        """
        sizes = {"VmRSS": 0, "RssFile": 0}
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in (proc / "self/status").read_text(encoding="ascii", errors="replace").splitlines():
                name, _, size = line.partition(":")
                if name in sizes:
                    sizes[name] = int(size.split()[0]) * 1024
        return cls(sizes["VmRSS"], sizes["RssFile"], weight_bytes, sum(touched_bytes(*pool) for pool in pools))


def touched_bytes(address: int, size: int) -> int:
    """Bytes of a mapped range, whole pages, that are in RAM; 0 where the system does not say."""
    page = mmap.PAGESIZE
    first = address // page * page
    count = -(-(address + size - first) // page)
    pages = ctypes.create_string_buffer(count)
    try:
        ask = ctypes.CDLL(None).mincore
    except (AttributeError, OSError):
        return 0
    if ask(ctypes.c_void_p(first), ctypes.c_size_t(count * page), pages) != 0:
        return 0
    return pages.raw.count(1) * page


def heap_facts() -> HeapFacts:
    """Ask glibc; another C library, or an allocator in its place, leaves all unknown or zero."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return HeapFacts()
    ask.restype = _Mallinfo2
    info = ask()
    return HeapFacts(info.arena + info.hblkhd, info.uordblks + info.hblkhd)


def settle() -> None:
    """After loading: give what was freed back to the system, and have garbage collection leave alone what stays.

    A full collection over all that torch defines stops every thread of Python for 80 ms.
    """
    gc.collect()
    gc.freeze()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class _Mallinfo2(ctypes.Structure):
    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",  # bytes from the system, but for mapped blocks
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",  # bytes in mapped blocks
            "usmblks",
            "fsmblks",
            "uordblks",  # bytes of the arena in use
            "fordblks",
            "keepcost",
        )
    ]


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """Count 2 (key and value) x layers x kv_heads x bytes of a row in a pool of this dtype."""
    return 2 * config.layer_count * config.kv_head_count * row_width(config.head_dim, dtype) * dtype.itemsize


def kv_formula(config: ModelConfig, dtype: torch.dtype) -> str:
    """The product of ``kv_bytes_per_token``, written out."""
    row = f"({config.head_dim} + {SCALE_BYTES} of scale)" if dtype is torch.int8 else f"{config.head_dim}"
    return (
        f"2 x {config.layer_count} layers x {config.kv_head_count} kv heads x {row} x "
        f"{dtype.itemsize} bytes = {kv_bytes_per_token(config, dtype)} bytes a token"
    )


def available_bytes() -> int:
    """Memory that this process may still take: the kernel's estimate, or the control group's limit if lower."""
    available = _UNKNOWN_BYTES
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return available
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return available
    return min(available, max(0, int(limit) - used)) if limit.isdigit() else available


def fitting_blocks(
    *,
    block_bytes: int,
    memory_bytes: int | None,
    utilization: float,
    most_useful: int,
) -> int:
    """Blocks for an explicit number of bytes, or for a share of what is available; never more than useful."""
    budget = memory_bytes if memory_bytes is not None else int(available_bytes() * utilization)
    return max(1, min(budget // block_bytes, most_useful))
