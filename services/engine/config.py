"""What an engine is made from, checked field by field. Knows no environment and no files but the model's path."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from services.engine.waiting import WaitingPolicy

BLOCK_SIZES = (8, 16, 32)
DTYPES = ("auto", "float32", "bfloat16")
KERNELS = ("cpu", "reference")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is made from. Raises ValueError naming the field that is wrong."""

    model_dir: Path
    dtype: str = "auto"
    """float32, bfloat16, or auto: bfloat16 when the weights are and the CPU multiplies it, else float32."""
    kernels: str = "cpu"
    """cpu or reference."""
    kv_blocks: int | None = None
    """Blocks of the KV pool; None: from the two below."""
    kv_memory_bytes: int | None = None
    """Bytes of the KV pool; None: from the share below."""
    kv_memory_utilization: float = 0.25
    """Share of the memory still available after the weights."""
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_chunk_tokens: int | None = None
    """Tokens of one prompt a step; None: as many as a step may have."""
    max_model_len: int | None = None
    """Context; None: the model's own. Cannot be longer than that."""
    threads: int | None = None
    """Threads of one tensor operation; None: torch's choice."""
    prefix_cache: bool = True
    watermark: float = 0.85
    waiting: WaitingPolicy = field(default_factory=WaitingPolicy)

    def __post_init__(self) -> None:
        for name in ("kv_blocks", "kv_memory_bytes", "max_chunk_tokens", "max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be positive")
        if self.max_model_len == 1:
            raise ValueError("max_model_len is 1; a prompt and an answer need at least 2")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it must be one of {', '.join(DTYPES)}")
        if self.kernels not in KERNELS:
            raise ValueError(f"kernels is {self.kernels!r}; it must be {' or '.join(KERNELS)}")
        if self.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size is {self.block_size}; it must be one of {BLOCK_SIZES}")
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {self.max_num_seqs}; it must be positive")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence can advance"
            )
        for name in ("kv_memory_utilization", "watermark"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 and at most 1")
