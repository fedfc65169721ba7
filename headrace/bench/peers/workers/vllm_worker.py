"""vLLM as a worker: `vllm_worker.py MODEL_DIRECTORY`. Cores and libraries are chosen by the environment."""

from __future__ import annotations

import sys

import vllm
from serving import Items, check_length, serve

SEQUENCES = 32
STEP_TOKENS = 2048
CONTEXT = 4096


def main() -> None:
    """Loads, then answers."""
    engine = vllm.LLM(
        sys.argv[1],
        dtype="bfloat16",
        max_num_seqs=SEQUENCES,
        max_num_batched_tokens=STEP_TOKENS,
        max_model_len=CONTEXT,
        enable_prefix_caching=True,
    )

    def generate(items: Items) -> None:
        greedy = [vllm.SamplingParams(max_tokens=count, ignore_eos=True, temperature=0) for _, count in items]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in items]
        for (_, count), result in zip(items, engine.generate(prompts, greedy, use_tqdm=False), strict=True):
            check_length(len(result.outputs[0].token_ids), count)

    serve(f"vLLM {vllm.__version__}", generate)


if __name__ == "__main__":  # its engine is a process that begins by importing this file
    main()
