"""The extension over keys and values as bytes computes what the reference does over such a pool, full of NaN."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.engine.model.native import NativeDecoder
from services.engine.plan import StepPlan
from tests.engine.factories import finish_all, make_engine, make_request, tiny_config, write_model
from tests.engine.kernels.test_native import CONFIGS, PARTS, Twin, needs_native, planned_steps, twins, ways

INT8 = torch.int8


def check(given: tuple[Twin, Twin, Twin], plans: list[StepPlan]) -> None:
    """In sum no further from float32 than torch's own bfloat16 is: one code that rounds the other way is seen far."""
    ours, theirs, exact = given
    distance = allowed = 0.0
    for plan in plans:
        expected, found = exact.logits(plan), ours.logits(plan)
        assert found.isfinite().all()
        distance += float((found - expected).square().mean())
        allowed += float((theirs.logits(plan) - expected).square().mean())
    assert distance**0.5 <= 1.3 * allowed**0.5


@needs_native
@pytest.mark.parametrize("way", sorted({*ways()[:2], *ways()[-1:]}) or ["none"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_stack_equals_the_reference(tmp_path: Path, name: str, way: str) -> None:
    """Families, groups 1 to 8, heads of 16 to 128, decode, chunks, mixtures, over blocks of each size in turn."""
    torch.ops.headrace.use_instruction_set(way)
    try:
        for place, parts in enumerate(PARTS):
            block_size = (8, 16, 32)[(list(CONFIGS).index(name) + place) % 3]
            given = twins(tmp_path / parts, CONFIGS[name], block_size, INT8)
            check(given, planned_steps(PARTS[parts], block_size, CONFIGS[name]["vocab_size"]))
    finally:
        torch.ops.headrace.use_instruction_set("")


@needs_native
@pytest.mark.parametrize(("group", "block_size"), [(1, 8), (3, 16), (7, 32), (8, 8)])
def test_contexts_that_are_split_and_chunks_over_them(tmp_path: Path, group: int, block_size: int) -> None:
    """Odd lengths in blocks of any size; two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        given = twins(tmp_path, tiny_config(num_attention_heads=group, num_key_value_heads=1), block_size, INT8)
        check(given, planned_steps([[527, 1, 9], [3, 40, 1]], block_size, 97))
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_the_engine_uses_it(tmp_path: Path, quantization: str) -> None:
    """With weights of either kind; answers alike cold, from shared blocks and beside others."""
    path = write_model(tmp_path, tiny_config(torch_dtype="bfloat16"))
    engine = make_engine(path, dtype="auto", quantization=quantization, kv_cache_dtype="int8", max_chunk_tokens=17)
    assert isinstance(engine._runner._decoder, NativeDecoder)
    assert engine.kv_cache_dtype == "int8"
    engine.warm_up()
    prompt = [(11 * i * i + 3 * i) % 97 for i in range(53)]
    cold = finish_all(engine, make_request(1, prompt=prompt))[1]
    again = finish_all(engine, make_request(2, prompt=prompt), make_request(3, prompt=prompt[:40]))
    assert again[2] == cold
    assert engine._cache.hit_token_count > 0


@needs_native
def test_a_pool_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Nothing is read beyond it."""
    ours, _, _ = twins(tmp_path, tiny_config(), 8, INT8)
    ours.kv = [layer[..., :-4].contiguous() for layer in ours.kv]
    (plan,) = planned_steps([[9]], 8, 97)
    with pytest.raises(RuntimeError, match=r"D \+ 4\] int8"):
        ours.logits(plan)
