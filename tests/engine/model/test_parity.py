"""The decoder equals transformers in fp32, whatever the family, grouping, block size, chunk or cache."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.engine import Engine
from tests.engine.factories import finish_all, make_engine, make_request, tiny_config, write_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": tiny_config(),
    "llama3": tiny_config(rope_scaling=LLAMA3_ROPE, tie_word_embeddings=True),
    "llama-bias": tiny_config(attention_bias=True),
    "mistral": tiny_config("MistralForCausalLM", sliding_window=None),
    "qwen2": tiny_config("Qwen2ForCausalLM", use_sliding_window=False),
    "qwen3": tiny_config("Qwen3ForCausalLM", head_dim=32, use_sliding_window=False),
}
GROUPS = ((2, 2), (4, 2), (6, 2), (4, 1), (7, 1), (8, 1))
PROMPT = [(11 * i * i + 3 * i) % 97 for i in range(53)]
TOLERANCE = 1e-3


def _reference(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def _reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@torch.inference_mode()
def _reference_answer(model: Any, ids: list[int], count: int) -> list[int]:
    known = list(ids)
    for _ in range(count):
        known.append(int(_reference_logits(model, known)[-1].argmax()))
    return known[len(ids) :]


class _Logits:
    """Keeps the logits that the runner hands to the sampler, by position of the token they follow."""

    def __init__(self, engine: Engine) -> None:
        self.rows: dict[int, torch.Tensor] = {}
        run = engine._runner.run

        def recording(plan: Any) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, logits = run(plan)
            for row, values in zip(plan.logit_rows.tolist(), logits.clone(), strict=True):
                self.rows[int(plan.positions[row])] = values
            return hidden, logits

        engine._runner.run = recording  # type: ignore[method-assign]


def _check(path: Path, model: Any, **engine_changes: Any) -> None:
    """One prompt, cold then cached: ids equal, logits within tolerance."""
    engine = make_engine(path, **engine_changes)
    expected = _reference_answer(model, PROMPT, 6)
    reference = _reference_logits(model, [*PROMPT, *expected])
    for request_id in (1, 2):
        seen = _Logits(engine)
        request = make_request(request_id, prompt=PROMPT, max_tokens=6)
        assert finish_all(engine, request)[request_id] == expected
        assert len(seen.rows) == 6
        for position, values in seen.rows.items():
            assert (values - reference[position]).abs().max() < TOLERANCE
    assert request.clock.cached_token_count > 0


@pytest.mark.parametrize("kernels", ["cpu", "reference"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_transformers(tmp_path: Path, name: str, kernels: str) -> None:
    """Greedy ids are equal and logits within 1e-3, on a pool full of NaN, cold and cached."""
    path = write_model(tmp_path, FAMILIES[name])
    _check(path, _reference(path), kernels=kernels, max_chunk_tokens=17)


def _shapes(family: int, group: int) -> list[tuple[int, int]]:
    """Block sizes and chunks to try: all with PARITY=full, else a third.

    The thirds are laid so that each family and each grouping meets every block size with every chunk.
    """
    shapes = list(itertools.product((8, 16, 32), (1, 15, 16, 17, 64)))
    if os.environ.get("PARITY") == "full":
        return shapes
    first = 5 * (family + group)
    return [shapes[place % len(shapes)] for place in range(first, first + 5)]


@pytest.mark.parametrize("group", GROUPS, ids=lambda g: f"{g[0]}q{g[1]}kv")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_grouping_block_size_and_chunk_equals_transformers(
    tmp_path: Path, name: str, group: tuple[int, int]
) -> None:
    """Query heads a key/value head 1, 2, 3, 4, 7, 8; blocks of 8, 16, 32; chunks of 1, 15, 16, 17, whole."""
    heads, kv_heads = group
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 16 * heads}
    path = write_model(tmp_path, {**FAMILIES[name], **changes})
    model = _reference(path)
    for block_size, chunk in _shapes(list(FAMILIES).index(name), GROUPS.index(group)):
        _check(path, model, block_size=block_size, max_chunk_tokens=chunk)


def test_a_third_of_the_shapes_covers_every_pair() -> None:
    """Of family, grouping, block size and chunk, any two values meet in some test of a third."""
    met = {
        (family, group, *shape)
        for family in range(len(FAMILIES))
        for group in range(len(GROUPS))
        for shape in _shapes(family, group)
    }
    for first, second in itertools.combinations(range(4), 2):
        values = [{case[place] for case in met} for place in (first, second)]
        assert {(case[first], case[second]) for case in met} == set(itertools.product(*values))
    assert [len({case[place] for case in met}) for place in range(4)] == [6, 6, 3, 5]


def test_a_mixed_batch_equals_transformers(tmp_path: Path) -> None:
    """Prompts of very different lengths, prefilling and decoding together, are each answered as alone."""
    path = write_model(tmp_path, tiny_config())
    model = _reference(path)
    engine = make_engine(path)
    prompts = [PROMPT[:n] * k for n, k in ((1, 1), (2, 1), (16, 1), (17, 1), (50, 1), (53, 5), (31, 1), (5, 9))]
    requests = [make_request(i, prompt=p, max_tokens=9) for i, p in enumerate(prompts)]
    answers = finish_all(engine, *requests)
    for request_id, prompt in enumerate(prompts):
        assert answers[request_id] == _reference_answer(model, prompt, 9)


def test_sharded_files_and_new_rope_field_are_read(tmp_path: Path) -> None:
    """What transformers itself saves, in several shards and with rope_parameters, loads the same."""
    path = write_model(tmp_path / "single", FAMILIES["llama3"])
    model = _reference(path)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="30KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    assert "rope_parameters" in json.loads((tmp_path / "sharded" / "config.json").read_text())
    _check(tmp_path / "sharded", model)
