"""Whether the GPU computes what the CPU does: exact ids in float32, logits of a real shape beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from services.engine.engine import Engine, EngineConfig
from services.engine.request import Request, SamplingParams
from tests.engine.factories import finish_all, make_request, tiny_config, write_model

_BFLOAT16_LOGITS = 0.06  # largest difference over largest logit, through all layers of a real model
_INT8_LOGITS = 0.02  # a number near the middle of two codes may be rounded to either
_SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.2, top_k=20, seed=2),
    SamplingParams(temperature=0.8, top_p=0.8, seed=3),
    SamplingParams(temperature=1.0, min_p=0.1, seed=4),
    SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.3),
)


def _requests(longest: int, output: int) -> list[Request]:
    prompts = (
        [5, 6, 7],
        [(11 * i * i + 3 * i) % 97 for i in range(longest)],
        [9] * (longest // 3),
        [1],
        [8, 9],
        [3, 4],
    )
    # A request with a penalty keeps steps from being planned ahead; it ends early.
    return [
        make_request(
            i,
            prompt=prompt,
            max_tokens=1 if sampling.repetition_penalty != 1 else output,
            sampling=sampling,
        )
        for i, (prompt, sampling) in enumerate(zip(prompts, _SAMPLINGS, strict=True))
    ]


def check_ids(folder: Path, device: torch.device) -> str | None:
    """Greedy and drawn ids of a small model in float32, beside those of the reference.

    With graphs and planned ahead, and with neither.
    """
    path = _model(folder)
    there = device.type == "cuda"
    asked = (150, 12) if there else (9, 3)  # Triton's interpreter takes a millisecond a program
    expected = finish_all(_engine(path, kernels="reference"), *_requests(*asked))
    for fast in (True, False) if there else (True,):
        engine = _engine(path, kernels="triton", cuda_graphs=fast, async_scheduling="on" if fast else "off")
        found = finish_all(engine, *_requests(*asked))
        wrong = [request_id for request_id in expected if found[request_id] != expected[request_id]]
        if wrong:
            return f"ids of requests {wrong} differ {'with' if fast else 'without'} graphs and planning ahead"
    return None


def check_bytes(folder: Path, device: torch.device) -> str | None:
    """Logits of a small model in float32 over a pool of int8, beside those of the reference over such a pool."""
    path = _model(folder)
    prompt = [(11 * i * i + 3 * i) % 97 for i in range(150 if device.type == "cuda" else 9)]
    found, expected = (
        _logits(_engine(path, kernels=kernels, kv_cache_dtype="int8"), prompt) for kernels in ("triton", "reference")
    )
    difference = float((found.cpu() - expected).abs().max() / expected.abs().max())
    return None if difference <= _INT8_LOGITS else f"logits differ by {difference:.4f} of the largest"


def _model(folder: Path) -> Path:
    config = tiny_config(num_attention_heads=6, hidden_size=96, num_hidden_layers=1)
    return write_model(folder / "parity", config)


def _engine(path: Path, **changes: Any) -> Engine:
    sizes = {"dtype": "float32", "kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return Engine.load(EngineConfig(path, **{**sizes, **changes}))  # type: ignore[arg-type]


@torch.inference_mode()
def check_logits(engine: Engine, theirs: Any, prompt: list[int]) -> str | None:
    """Logits after a prompt, in bfloat16, beside those of transformers on the same weights."""
    found = _logits(engine, prompt)
    expected = theirs(torch.tensor([prompt], device=theirs.device)).logits[0, -1].float()
    difference = float((found - expected).abs().max() / expected.abs().max())
    return None if difference <= _BFLOAT16_LOGITS else f"logits differ by {difference:.3f} of the largest"


def _logits(engine: Engine, prompt: list[int]) -> torch.Tensor:
    """[vocabulary] float32 logits after a prompt."""
    seen: list[torch.Tensor] = []
    run = engine._runner.run

    def recording(plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, logits = run(plan)
        seen.append(logits.float().clone())
        return hidden, logits

    engine._runner.run = recording  # type: ignore[method-assign]
    try:
        finish_all(engine, make_request(1, prompt=prompt, max_tokens=1))
    finally:
        engine._runner.run = run  # type: ignore[method-assign]
    return seen[-1][-1]
