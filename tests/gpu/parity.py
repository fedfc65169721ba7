"""Whether the GPU computes what the CPU does: exact ids in float32, logits of a real shape beside transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from services.engine.engine import Engine, EngineConfig
from services.engine.request import Request, SamplingParams
from tests.engine.factories import finish_all, make_request, tiny_config, write_model

_BFLOAT16_LOGITS = 0.06  # largest difference over largest logit, through all layers of a real model
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
    return [
        make_request(i, prompt=prompt, max_tokens=output, sampling=sampling)
        for i, (prompt, sampling) in enumerate(zip(prompts, _SAMPLINGS, strict=True))
    ]


def check_ids(folder: Path, device: torch.device) -> str | None:
    """Greedy and drawn ids of a small model in float32, with and without graphs, beside those of the reference."""
    path = write_model(folder / "parity", tiny_config(num_attention_heads=6, hidden_size=96, num_hidden_layers=1))
    there = device.type == "cuda"
    asked = (150, 12) if there else (9, 2)  # Triton's interpreter takes a millisecond a program
    sizes = {"dtype": "float32", "kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    expected = finish_all(Engine.load(EngineConfig(path, kernels="reference", **sizes)), *_requests(*asked))
    for graphs in (True, False) if there else (False,):
        found = finish_all(
            Engine.load(EngineConfig(path, kernels="triton", cuda_graphs=graphs, **sizes)), *_requests(*asked)
        )
        wrong = [request_id for request_id in expected if found[request_id] != expected[request_id]]
        if wrong:
            return f"ids of requests {wrong} differ {'with' if graphs else 'without'} graphs"
    return None


@torch.inference_mode()
def check_logits(engine: Engine, theirs: Any, prompt: list[int]) -> str | None:
    """Logits after a prompt, in bfloat16, beside those of transformers on the same weights."""
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
    expected = theirs(torch.tensor([prompt], device=theirs.device)).logits[0, -1].float()
    difference = float((seen[-1][-1] - expected).abs().max() / expected.abs().max())
    return None if difference <= _BFLOAT16_LOGITS else f"logits differ by {difference:.3f} of the largest"
