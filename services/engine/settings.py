"""Settings of the engine process."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.logs import LogSettings
from services.common.models import ModelSettings
from services.common.serve import ServerSettings
from services.common.settings import setting
from services.common.shared import RedisSettings
from services.common.telemetry import TelemetrySettings
from services.common.tls import PeerTlsSettings, TlsSettings


@dataclass(frozen=True)
class EngineSettings:
    """What the engine itself can be told."""

    SECTION = "ENGINE"
    dtype: str = setting(
        "auto",
        "number format; auto: bfloat16 if weights and device have it",
        choices=("auto", "float32", "bfloat16"),
    )
    device: str = setting(
        "auto", "cpu or cuda; auto: cuda where there is one and nothing needs the CPU", choices=("auto", "cpu", "cuda")
    )
    kernels: str = setting(
        "auto",
        "triton on a GPU; cpu: the C++ extension (bfloat16, AVX2 or AVX-512; built on first use), else torch; torch "
        "alone; the plain reference; auto: by the device",
        choices=("auto", "cpu", "torch", "reference", "triton"),
    )
    quantization: str = setting(
        "none",
        "int8: weights and activations as bytes (C++ extension); see `headrace bench accuracy`",
        choices=("none", "int8"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "int8: keys and values as bytes, a scale for each token and head; about twice the tokens fit; auto: as dtype",
        choices=("auto", "int8"),
    )
    tensor_parallel: int = setting(1, "processes, each with a GPU, that share the model", minimum=1, maximum=64)
    cuda_graphs: bool = setting(True, "on one GPU: record decode steps once, and replay them")
    kv_blocks: int | None = setting(None, "blocks of the KV pool; unset: from memory", minimum=1)
    kv_memory_bytes: int | None = setting(None, "bytes of the KV pool; unset: from the utilization", minimum=1)
    kv_memory_utilization: float = setting(
        0.25, "share of the memory left after the weights that the KV pool takes; on a CPU", minimum=0.001, maximum=1
    )
    gpu_memory_utilization: float = setting(
        0.9, "share of a GPU's memory for weights, activations and KV pool together", minimum=0.001, maximum=1
    )
    block_size: int = setting(16, "tokens in a KV block: 8, 16 or 32", minimum=8, maximum=32)
    max_num_seqs: int = setting(32, "most sequences in one step", minimum=1, maximum=4096)
    max_num_batched_tokens: int = setting(512, "most tokens in one step", minimum=1, maximum=1_000_000)
    profile: str = setting(
        "interactive",
        "beside running answers, prompts go first in small chunks (interactive) or last in large ones (throughput)",
        choices=("interactive", "throughput"),
    )
    max_chunk_tokens: int | None = setting(
        None,
        "most tokens of one prompt in one step; unset: interactive 32 beside running answers, otherwise all of a step",
        minimum=1,
        maximum=1_000_000,
    )
    standard_wait_s: float = setting(
        10.0, "longest wait of a standard request before it goes first", minimum=0, maximum=86_400
    )
    batch_wait_s: float = setting(60.0, "the same of a batch request", minimum=0, maximum=86_400)
    watermark: float = setting(
        0.85,
        "share of the KV pool that may be in use after a request is admitted beside others",
        minimum=0.01,
        maximum=1,
    )
    paused_kv_share: float = setting(
        0.5, "share of the KV pool that one tenant's paused requests may keep", minimum=0.01, maximum=1
    )
    max_model_len: int | None = setting(None, "context in tokens; unset: the model's own", minimum=2)
    threads: int | None = setting(None, "threads of one tensor operation; unset: one a core", minimum=1, maximum=1024)
    num_speculative_tokens: int = setting(
        0, "most guessed tokens computed of one request in one step; 0: no speculation", minimum=0, maximum=64
    )
    async_scheduling: str = setting(
        "auto",
        "plan a step while the last one is computed: on, off; auto: on a GPU, where nothing is guessed",
        choices=("auto", "on", "off"),
    )
    prefix_cache: bool = setting(True, "keep the KV of finished prompts for later ones")
    deterministic: bool = setting(False, "the same bits whatever the batch, the chunks and the cache; slower")


@dataclass(frozen=True)
class RegistrySettings:
    """Whether the engine says by itself where it is."""

    SECTION = "ENGINE"
    advertise: str = setting(
        "", "host:port under which gateways and stream processes reach it; registered in Redis; empty: not registered"
    )


@dataclass(frozen=True)
class EngineProcessSettings:
    """Everything that the engine process can be told."""

    server: ServerSettings = ServerSettings(port=50053)
    tls: TlsSettings = TlsSettings()
    peer_tls: PeerTlsSettings = PeerTlsSettings()
    engine: EngineSettings = EngineSettings()
    model: ModelSettings = ModelSettings()
    registry: RegistrySettings = RegistrySettings()
    redis: RedisSettings = RedisSettings()
    trace: TelemetrySettings = TelemetrySettings()
    log: LogSettings = LogSettings()
