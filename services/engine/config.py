"""What an engine is made from, checked field by field. Knows no environment and no files but the model's path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.engine.budget import PROFILES, BudgetPolicy
from services.engine.request import Priority
from services.engine.scheduler import SchedulerConfig
from services.engine.waiting import WaitingPolicy

_CHOICES: dict[str, tuple[object, ...]] = {
    "dtype": ("auto", "float32", "bfloat16"),
    "device": ("auto", "cpu", "cuda"),
    "kernels": ("auto", "cpu", "torch", "reference", "triton"),
    "quantization": ("none", "int8"),
    "kv_cache_dtype": ("auto", "int8"),
    "block_size": (8, 16, 32),
    "profile": PROFILES,
    "async_scheduling": ("auto", "on", "off"),
}
_LONGEST_WAIT_S = 86_400
INTERACTIVE_CHUNK_TOKENS = 32
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything an engine is made from. Raises ValueError naming the field that is wrong."""

    model_dir: Path
    dtype: str = "auto"
    """float32, bfloat16, or auto: bfloat16 when the weights are and the device multiplies it, else float32."""
    device: str = "auto"
    """cpu, cuda, or auto: a CUDA device if there is one and nothing that is asked for needs the CPU."""
    kernels: str = "auto"
    """triton: the GPU's. cpu: the C++ extension where it can be built and computes this, else torch; torch; reference.
    auto: triton or cpu, by the device."""
    quantization: str = "none"
    """none, or int8: weights and activations as bytes in the C++ extension, beside bfloat16 for all else."""
    kv_cache_dtype: str = "auto"
    """auto: the dtype. int8: keys and values as bytes with a scale for each token and head; twice the tokens fit."""
    tensor_parallel: int = 1
    """Ranks that share the model, a process each: as many GPUs, or on a CPU as many sets of threads."""
    cuda_graphs: bool = True
    """On one GPU: record decode steps once, and replay them."""
    kv_blocks: int | None = None
    """Blocks of the KV pool; None: from the two below."""
    kv_memory_bytes: int | None = None
    """Bytes of the KV pool; None: from the share below."""
    kv_memory_utilization: float = 0.25
    """Share of the memory still available after the weights; on a CPU."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, activations and the KV pool together."""
    block_size: int = 16
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    profile: str = "interactive"
    """interactive or throughput: what prompts may take of a step in which other requests decode."""
    max_chunk_tokens: int | None = None
    """Tokens of one prompt a step; None: as many as a step may have, but INTERACTIVE_CHUNK_TOKENS beside decodes in
    the interactive profile."""
    max_model_len: int | None = None
    """Context; None: the model's own. Cannot be longer than that."""
    threads: int | None = None
    """Threads of one tensor operation; None: torch's choice."""
    num_speculative_tokens: int = 0
    """Guessed tokens of one request a step, at most; 0: none."""
    async_scheduling: str = "auto"
    """on: a step is planned while the last one is computed. auto: on a CUDA device, where nothing is guessed."""
    prefix_cache: bool = True
    deterministic: bool = False
    """Same ids and log probabilities, bit for bit, whatever the batch, the chunks and the cache; slower."""
    watermark: float = 0.85
    """Share of the pool that may be referenced after an admission."""
    paused_kv_share: float = 0.5
    """Share of the pool that paused requests under one salt may keep."""
    standard_wait_s: float = 10.0
    """Longest wait of standard requests before they go first."""
    batch_wait_s: float = 60.0
    """The same of batch requests."""

    def __post_init__(self) -> None:
        for name in ("kv_blocks", "kv_memory_bytes", "max_chunk_tokens", "max_model_len", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be positive")
        if self.max_model_len == 1:
            raise ValueError("max_model_len is 1; a prompt and an answer need at least 2")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(map(str, choices))}")
        for name in ("max_num_seqs", "tensor_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        self._check_together()
        for name in ("kv_memory_utilization", "gpu_memory_utilization", "watermark", "paused_kv_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 and at most 1")
        for name in ("standard_wait_s", "batch_wait_s"):
            if not 0 <= getattr(self, name) <= _LONGEST_WAIT_S:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 to {_LONGEST_WAIT_S}")

    def _check_together(self) -> None:
        if self.num_speculative_tokens < 0:
            raise ValueError(f"num_speculative_tokens is {self.num_speculative_tokens}; it must not be negative")
        if self.async_scheduling == "on" and self.num_speculative_tokens:
            raise ValueError(
                f"async_scheduling is 'on' with num_speculative_tokens {self.num_speculative_tokens}; it needs 0, "
                "since a guess follows a token that is known"
            )
        if self.deterministic and (self.kernels not in ("auto", "cpu") or self.device == "cuda"):
            raise ValueError(f"deterministic is on with kernels {self.kernels!r}, device {self.device!r}; it needs cpu")
        if self.deterministic and self.tensor_parallel > 1:
            raise ValueError(f"deterministic is on with tensor_parallel {self.tensor_parallel}; it needs 1")
        if self.quantization != "none":
            self._check_quantised()
        if self.device == "cuda" and self.kernels not in ("auto", "triton"):
            raise ValueError(f"kernels is {self.kernels!r} with device 'cuda'; it must be auto or triton")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running sequence can advance"
            )

    def _check_quantised(self) -> None:
        """It is the C++ extension that computes it, on one rank, in bfloat16, with sums that depend on the step."""
        for name, fitting in (
            ("kernels", ("auto", "cpu")),
            ("device", ("auto", "cpu")),
            ("dtype", ("auto", "bfloat16")),
            ("deterministic", (False,)),
            ("tensor_parallel", (1,)),
        ):
            if getattr(self, name) not in fitting:
                raise ValueError(
                    f"quantization is {self.quantization!r} with {name} {getattr(self, name)!r}; it needs "
                    f"{' or '.join(map(str, fitting))}"
                )

    def plans_ahead(self, device_type: str) -> bool:
        """Whether a step is planned while the last one is computed: of use where a device computes by itself."""
        if self.async_scheduling == "auto":
            return device_type == "cuda" and not self.num_speculative_tokens
        return self.async_scheduling == "on"

    def scheduling(self) -> SchedulerConfig:
        """The scheduler's part of it."""
        chunk = self.max_chunk_tokens
        standard_ns, batch_ns = int(self.standard_wait_s * _SECOND_NS), int(self.batch_wait_s * _SECOND_NS)
        return SchedulerConfig(
            block_size=self.block_size,
            budget=BudgetPolicy(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_batched_tokens,
                max_chunk_tokens=chunk or self.max_num_batched_tokens,
                shared_chunk_tokens=(chunk or INTERACTIVE_CHUNK_TOKENS) if self.profile == "interactive" else None,
            ),
            watermark=self.watermark,
            paused_kv_share=self.paused_kv_share,
            num_speculative_tokens=self.num_speculative_tokens,
            waiting=WaitingPolicy({Priority.STANDARD: standard_ns, Priority.BATCH: batch_ns}),
        )
