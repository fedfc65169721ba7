"""OpenVINO GenAI as a worker: `openvino_worker.py MODEL.gguf THREADS`. It computes in bfloat16."""

from __future__ import annotations

import sys

import numpy as np
import openvino
import openvino_genai
from serving import Items, check_length, serve

CACHE_GB = 2
SEQUENCES = 32
STEP_TOKENS = 2048


def main() -> None:
    """Loads, then answers."""
    model, threads = sys.argv[1:]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GB, True
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = SEQUENCES, STEP_TOKENS
    hints = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": int(threads)}
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", hints)

    def generate(items: Items) -> None:
        greedy = []
        for _, count in items:
            one = openvino_genai.GenerationConfig()
            one.max_new_tokens = one.min_new_tokens = count
            one.ignore_eos, one.do_sample = True, False
            greedy.append(one)
        prompts = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt, _ in items]
        for (_, count), result in zip(items, pipeline.generate(prompts, greedy), strict=True):
            check_length(len(result.m_generation_ids[0]), count)

    serve(f"OpenVINO GenAI {openvino_genai.__version__}", generate)


if __name__ == "__main__":
    main()
