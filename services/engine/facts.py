"""What an engine says of itself: its limits, its memory, its model's defaults. Knows no gRPC."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.v1 import engine_pb2, generation_pb2
from services.common.serve import StartError
from services.engine.engine import Engine
from services.engine.memory import heap_facts

_SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def facts_of(
    engine: Engine, model: str, default_sampling: generation_pb2.SamplingParameters
) -> engine_pb2.GetEngineResponse:
    """What GetEngine answers."""
    limits, memory, config, heap = engine.limits, engine.memory, engine.config, heap_facts()
    return engine_pb2.GetEngineResponse(
        model=model,
        architecture=engine.model.family.architecture,
        dtype=engine.dtype,
        quantization=config.quantization,
        kv_cache_dtype=engine.kv_cache_dtype,
        context_length=limits.context_length,
        vocabulary_size=limits.vocab_size,
        eos_token_ids=sorted(limits.eos_token_ids),
        kv_token_capacity=limits.kv_token_capacity,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        default_sampling=default_sampling,
        memory=engine_pb2.MemoryLedger(
            weight_bytes=memory.weight_bytes,
            kv_bytes=memory.kv_bytes,
            kv_bytes_per_token=memory.kv_bytes_per_token,
            kv_block_size=memory.block_size,
            kv_block_count=memory.block_count,
            kv_formula=memory.kv_formula,
            peak_activation_bytes=memory.peak_activation_bytes,
            allocator_reserved_bytes=heap.reserved_bytes,
            allocator_allocated_bytes=heap.allocated_bytes,
            allocator_largest_free_bytes=heap.largest_free_bytes,
        ),
    )


def default_sampling(directory: Path) -> generation_pb2.SamplingParameters:
    """What generation_config.json says of sampling, whatever its `do_sample`: a value that is there is meant.

    Raises:
        StartError: the file is there and is not a JSON object, or a value has the wrong type.
    """
    path = directory / "generation_config.json"
    if not path.exists():
        return generation_pb2.SamplingParameters()
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        given = {name: said[name] for name in _SAMPLING_DEFAULTS if said.get(name) is not None}
        return generation_pb2.SamplingParameters(**given)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StartError(f"{path}: {error}; expected a generation_config of transformers") from error
