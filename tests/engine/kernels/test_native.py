"""The extension computes what the reference does, to bfloat16, and leaves no unwritten slot in a result."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.engine.kernels import CpuKernels, Kernels, ReferenceKernels, native
from services.engine.kernels.native import build
from services.engine.model.config import ModelConfig, load_config
from services.engine.model.decoder import Decoder
from services.engine.model.native import NativeDecoder
from services.engine.model.weights import WeightReader
from services.engine.plan import PlannedSequence, StepPlan, build_plan
from services.engine.runner import allocate_kv
from tests.engine.factories import finish_all, make_engine, make_request, spoil, tiny_config, write_model

BLOCKS = 120
REASON = native.load()
needs_native = pytest.mark.skipif(REASON is not None, reason=f"the extension is not here: {REASON}")


def ways() -> list[str]:
    return [] if REASON is not None else torch.ops.headrace.instruction_sets()


@pytest.fixture(params=sorted({*ways()[:2], *ways()[-1:]}) or ["none"])
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    """AVX2, the least AVX-512, and the best that this processor has; what is left out differs for bytes alone."""
    torch.ops.headrace.use_instruction_set(request.param)
    yield
    torch.ops.headrace.use_instruction_set("")


@dataclass
class Twin:
    """One decoder with a pool of its own."""

    decoder: Any
    kernels: Kernels
    kv: list[torch.Tensor]
    dtype: torch.dtype

    def logits(self, plan: StepPlan) -> torch.Tensor:
        hidden = self.decoder.forward(
            token_ids=torch.from_numpy(plan.token_ids),
            positions=torch.from_numpy(plan.positions),
            slots=torch.from_numpy(plan.slots).long(),
            kv=self.kv,
            batch=self.kernels.prepare(plan, self.dtype),
        )
        logits: torch.Tensor = self.decoder.logits(hidden, torch.arange(plan.token_count)).float()
        return logits


def widened(path: Path, model: ModelConfig, rounded: WeightReader) -> WeightReader:
    """What another reader gives, in float32."""

    class Widened(WeightReader):
        def read(self, name: str) -> torch.Tensor:
            return rounded.read(name).float()

    return Widened(path, model, torch.float32)


def nan_pool(model: ModelConfig, block_size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """A pool of `BLOCKS` blocks in which nothing was written."""
    layers = allocate_kv(model, BLOCKS, block_size, dtype)
    spoil(layers)
    return layers


def twins(
    tmp_path: Path, config: dict[str, Any], block_size: int, kv_dtype: torch.dtype | None = None
) -> tuple[Twin, Twin, Twin]:
    """The extension; torch in bfloat16; the reference in float32: on the same bfloat16 weights, pools full of NaN."""
    path = write_model(tmp_path, {**config, "torch_dtype": "bfloat16", "max_position_embeddings": 2048})
    model = load_config(path)
    rounded = WeightReader(path, model, torch.bfloat16)

    half, full, length = torch.bfloat16, torch.float32, model.context_length
    plain, exact = CpuKernels(), ReferenceKernels()
    wide = widened(path, model, rounded)
    return (
        Twin(
            NativeDecoder(model, rounded, length),
            native.NativeKernels(),
            nan_pool(model, block_size, kv_dtype or half),
            half,
        ),
        Twin(Decoder(model, rounded, plain, half, length), plain, nan_pool(model, block_size, kv_dtype or half), half),
        Twin(Decoder(model, wide, exact, full, length), exact, nan_pool(model, block_size, kv_dtype or full), full),
    )


def planned_steps(parts: list[list[int]], block_size: int, vocab: int) -> list[StepPlan]:
    """Plans in which sequence s computes parts[s][i] tokens in step i, over shuffled blocks; zero: not in that step."""
    random = np.random.default_rng(5)
    order = random.permutation(BLOCKS).astype(np.int32) + 1
    sequences, taken = [], 0
    for part in parts:
        blocks = -(-sum(part) // block_size)
        sequences.append((random.integers(0, vocab, sum(part)).astype(np.int32), order[taken : taken + blocks]))
        taken += blocks
    assert taken <= BLOCKS
    plans = []
    for step in range(max(map(len, parts))):
        planned = []
        for (ids, table), part in zip(sequences, parts, strict=True):
            if step < len(part) and part[step]:
                start = sum(part[:step])
                planned.append(PlannedSequence(ids[start : start + part[step]], start, table, logit_count=1))
        planned.sort(key=lambda p: p.token_ids.size > 1)  # one-token sequences first
        plans.append(build_plan(planned, block_size))
    return plans


def check(given: tuple[Twin, Twin, Twin], plans: list[StepPlan]) -> None:
    """No further from float32 than torch's own bfloat16 is, with room for luck; never NaN."""
    ours, theirs, exact = given
    for plan in plans:
        expected = exact.logits(plan)
        scale = expected.abs().max()
        found, usual = ours.logits(plan), theirs.logits(plan)
        assert found.isfinite().all()
        distance, allowed = (found - expected).abs().max(), (usual - expected).abs().max()
        assert distance <= 1.5 * allowed + 0.01 * scale


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": tiny_config(),
    "odd-vocabulary-and-inner": tiny_config(vocab_size=101, intermediate_size=90, hidden_size=50),
    "tied-three-heads": tiny_config(num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True),
    "group-7-bias": tiny_config("Qwen2ForCausalLM", num_attention_heads=7, num_key_value_heads=1, head_dim=64),
    "norms": tiny_config("Qwen3ForCausalLM", head_dim=48, num_attention_heads=8, num_key_value_heads=1),
    "wide-heads": tiny_config(num_attention_heads=4, num_key_value_heads=4, head_dim=128, attention_bias=True),
    "eighty": tiny_config(num_attention_heads=8, num_key_value_heads=4, head_dim=80),
}
PARTS = {
    "decode": [[5, 1, 1, 1], [16, 1, 1, 1], [17, 1, 1, 0], [31, 1, 1, 1], [1, 1, 1, 1]],
    "chunks": [[7, 33, 60, 1, 9], [70, 1, 1, 1], [0, 2, 15, 17, 1]],
    "many": [[1 + s % 4, 1] for s in range(21)],
}


@needs_native
@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_stack_equals_the_reference(tmp_path: Path, name: str, parts: str) -> None:
    """Families, groups 1 to 8, heads of 16 to 128, rows of weights that fill no panel; decode, chunks, mixtures."""
    block_size = (8, 16, 32)[(list(CONFIGS).index(name) + list(PARTS).index(parts)) % 3]
    check(
        twins(tmp_path, CONFIGS[name], block_size),
        planned_steps(PARTS[parts], block_size, CONFIGS[name]["vocab_size"]),
    )


@needs_native
@pytest.mark.parametrize(("threads", "group"), [(2, 1), (2, 2), (1, 3), (2, 3), (3, 3), (2, 4), (2, 7), (2, 8)])
def test_every_group_with_any_number_of_threads(tmp_path: Path, threads: int, group: int) -> None:
    """Contexts that are split among threads and put together again are among them."""
    block_size = (8, 16, 32)[group % 3]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        given = twins(tmp_path, tiny_config(num_attention_heads=group, num_key_value_heads=1), block_size)
        check(given, planned_steps([[530, 1, 9], [3, 40, 1]], block_size, 97))
    finally:
        torch.set_num_threads(before)


@needs_native
def test_steps_out_of_bounds_are_refused(tmp_path: Path) -> None:
    """Nothing is read or written outside the pool, the tables or the vocabulary."""
    ours, _, _ = twins(tmp_path, tiny_config(), 8)
    for field, place, value in (("token_ids", 3, 97), ("slots", 0, 1 << 20), ("block_tables", (0, 0), 500)):
        (plan,) = planned_steps([[9]], 8, 97)
        getattr(plan, field)[place] = value
        with pytest.raises(RuntimeError, match="bounds"):
            ours.logits(plan)
    (plan,) = planned_steps([[9]], 8, 97)
    plan.positions[4] = 7
    with pytest.raises(RuntimeError, match="do not end its context"):
        ours.logits(plan)


@needs_native
def test_the_engine_uses_it_for_bfloat16(tmp_path: Path) -> None:
    """And answers alike cold, from the cache and beside others, on a pool full of NaN."""
    path = write_model(tmp_path, tiny_config(torch_dtype="bfloat16"))
    engine = make_engine(path, dtype="bfloat16", max_chunk_tokens=17)
    assert isinstance(engine._runner._decoder, NativeDecoder)
    assert not isinstance(make_engine(path)._runner._decoder, NativeDecoder)
    assert not isinstance(make_engine(path, dtype="bfloat16", kernels="torch")._runner._decoder, NativeDecoder)
    engine.warm_up()
    prompt = [(11 * i * i + 3 * i) % 97 for i in range(53)]
    answers = [finish_all(engine, make_request(i, prompt=prompt))[i] for i in (1, 2)]
    assert answers[0] == answers[1]
    assert all(len(a) == 8 for a in answers)


@needs_native
def test_other_python_threads_run_meanwhile(tmp_path: Path) -> None:
    """The interpreter's lock is free while a step computes."""
    wide = tiny_config(hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    ours, _, _ = twins(tmp_path, wide, 16)
    (plan,) = planned_steps([[1500]], 16, 97)
    done = threading.Event()
    worker = threading.Thread(target=lambda: (ours.logits(plan), done.set()))
    worker.start()
    turns = 0
    while not done.is_set():
        turns += 1
        time.sleep(0.0005)
    worker.join()
    assert turns > 3


def test_the_reason_is_given_where_it_cannot_be_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No AVX2; no compiler; a compiler that fails."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"avx512f"}))
    with pytest.raises(build.NotBuilt, match="no AVX2"):
        build.library()
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(build._NEEDED))
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(build.NotBuilt, match=r"no C\+\+ compiler"):
        build.library()
    monkeypatch.undo()
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(build._NEEDED))
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'x.cpp:1: error: no such thing'\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(build, "_compiler", lambda: str(broken))
    with pytest.raises(build.NotBuilt, match="error: no such thing"):
        build.library()
    assert not list(tmp_path.rglob("*.so"))


def test_an_image_brings_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was prebuilt from these sources is taken where there is no compiler; from others, it is not."""
    monkeypatch.setattr(build, "_PREBUILT", tmp_path)
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset(build._NEEDED))
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with monkeypatch.context() as at_build:
        at_build.setattr(build, "_compiler", lambda: "c++")
        at_build.setattr(build, "_build", lambda _, target: target.write_bytes(b""))
        built = build.prebuild()
    assert build.library() == built
    monkeypatch.setattr(build, "_COMMON", ("-O0",))
    with pytest.raises(build.NotBuilt, match=r"no C\+\+ compiler"):
        build.library()


def test_one_log_line_says_that_torch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """However many engines are made; and they work."""

    def refuse() -> Path:
        raise build.NotBuilt("no C++ compiler was found")

    monkeypatch.setattr(native, "_state", [])
    monkeypatch.setattr(native, "library", refuse)
    path = write_model(tmp_path, tiny_config(torch_dtype="bfloat16"))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            engine = make_engine(path, dtype="bfloat16")
            assert isinstance(engine._runner._decoder, Decoder)
            assert len(finish_all(engine, make_request())[1]) == 8
    assert [r.levelname for r in caplog.records if "no C++ compiler" in r.message] == ["WARNING"]


@needs_native
def test_the_environment_may_ask_for_a_lesser_processor() -> None:
    """What is not here is refused by name."""
    code = (
        "import torch; from services.engine.kernels import native; "
        "print(native.load(), torch.ops.headrace.instruction_set())"
    )
    asked = {**os.environ, "HEADRACE_NATIVE_ISA": "AVX2"}
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=asked).stdout
    assert found.split() == ["None", "AVX2"]
    with pytest.raises(ValueError, match=r"HEADRACE_NATIVE_ISA is 'SSE9'; here it must be one of AVX2"):
        native._use("SSE9")


@needs_native
def test_it_is_built_once() -> None:
    """A second process finds what the first one built."""
    code = "from services.engine.kernels.native import build; build._build = None; print(build.library())"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout
