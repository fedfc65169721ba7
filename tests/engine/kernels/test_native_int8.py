"""The extension in int8 computes what plain arithmetic on the same codes does, and is refused where it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from headrace.v1 import generation_pb2
from services.engine.facts import facts_of
from services.engine.kernels import Linear, ReferenceKernels, native
from services.engine.model.config import load_config
from services.engine.model.decoder import Decoder
from services.engine.model.native import NativeDecoder
from services.engine.model.weights import WeightReader
from tests.engine.factories import finish_all, make_engine, make_request, tiny_config, write_model
from tests.engine.kernels.test_native import (
    CONFIGS,
    PARTS,
    Twin,
    nan_pool,
    needs_native,
    planned_steps,
    ways,
    widened,
)

GROUP = 64


def _codes(x: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, groups, 64] codes of [n, k] bfloat16 rows, and their [n, groups, 1] scales, both float32."""
    groups = functional.pad(x.float(), (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    if scale_dtype is torch.bfloat16:  # of weights: rounded first, so that the codes belong to what is kept
        scale = (largest / 127).bfloat16().float()
        return torch.where(scale == 0, 0, groups * (1 / scale)).round().clamp(-127, 127), scale
    return torch.where(largest == 0, 0, groups * (torch.full_like(largest, 127) / largest)).round(), largest / 127


def _kept(weight: torch.Tensor) -> torch.Tensor:
    """A weight as its codes have it."""
    codes, scale = _codes(weight.bfloat16(), torch.bfloat16)
    return (codes * scale).flatten(1)[:, : weight.shape[1]]


class _Int8Kernels(ReferenceKernels):
    """The reference over codes: weights rounded once, activations before each product."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        kept = _kept(weight)

        def product(x: torch.Tensor) -> torch.Tensor:
            codes, scale = _codes(x.bfloat16(), torch.float32)
            return functional.linear((codes * scale).flatten(1)[:, : x.shape[1]], kept, bias)

        return product


def _head(vocab: int, hidden: int, weight: torch.Tensor, norm: torch.Tensor) -> Any:
    """A stack of no layers but the head."""
    table = torch.zeros(1, 8)
    stack = torch.classes.headrace.Stack([hidden, 1, 1, 16, 16, vocab, 1], 0.0, table, table, True, True)
    stack.add_ends(weight, None, norm)
    return stack


def _unit_rows(rows: int, width: int) -> torch.Tensor:
    """[rows, width] whose root mean square is exactly 1 in any order of summing; width is a multiple of 8."""
    base = torch.tensor([1.5, 1.5, 1.5, 0.5, 0.5, 0.5, 0.5, 0.5]).repeat(rows, width // 8)
    order = torch.rand(rows, width).argsort(1)
    return base.gather(1, order) * (torch.randint(0, 2, (rows, width)) * 2 - 1)


@needs_native
@pytest.mark.parametrize(("vocab", "hidden"), [(97, 48), (101, 64), (16, 72), (33, 576), (500, 136), (1, 8)])
def test_products_are_exact_sums_of_codes(vocab: int, hidden: int) -> None:
    """Any number of rows and outputs, groups that are not full; the same bits alone or not, on any processor."""
    torch.manual_seed(vocab)
    weight, norm = torch.randn(vocab, hidden).bfloat16(), torch.randn(hidden).bfloat16().float()
    weight[0] = 0
    stack, x = _head(vocab, hidden, weight, norm), _unit_rows(20, hidden)
    x_codes, x_scale = _codes((x * norm).bfloat16(), torch.float32)
    w_codes, w_scale = _codes(weight, torch.bfloat16)
    sums = torch.einsum("rgk,ngk->rng", x_codes.double(), w_codes.double())
    parts = sums * (x_scale.double().squeeze(2)[:, None] * w_scale.double().squeeze(2)[None])
    expected, allowed = parts.sum(-1), 1e-6 * parts.abs().sum(-1) + 1e-30
    seen = []
    for way in ways():
        torch.ops.headrace.use_instruction_set(way)
        try:
            together = torch.ops.headrace.logits(stack, x, torch.arange(20))
            assert ((together - expected).abs() <= allowed).all()
            for count in range(1, 20):
                rows = torch.arange(20 - count, 20)
                assert torch.ops.headrace.logits(stack, x, rows).equal(together[rows])
            seen.append(together)
        finally:
            torch.ops.headrace.use_instruction_set("")
    assert all(one.equal(seen[0]) for one in seen)


@needs_native
def test_a_row_that_is_not_finite_stays_so_and_alone() -> None:
    """NaN and infinity never become numbers that look like an answer."""
    stack, x = _head(40, 128, torch.randn(40, 128).bfloat16(), torch.ones(128)), _unit_rows(9, 128)
    clean = torch.ops.headrace.logits(stack, x, torch.arange(9))
    for value in (float("nan"), float("inf")):
        broken = x.clone()
        broken[4, 77] = value
        found = torch.ops.headrace.logits(stack, broken, torch.arange(9))
        assert not found[4].isfinite().any()
        others = [row for row in range(9) if row != 4]
        assert found[others].equal(clean[others])


@needs_native
@pytest.mark.parametrize("name", CONFIGS)
def test_the_stack_equals_the_reference_over_codes(tmp_path: Path, name: str) -> None:
    """Families, odd shapes, decode and chunks over NaN-filled pools: as near as bfloat16 between products lets."""
    config = {**CONFIGS[name], "torch_dtype": "bfloat16", "max_position_embeddings": 2048}
    path = write_model(tmp_path, config)
    model = load_config(path)
    rounded = WeightReader(path, model, torch.bfloat16)
    length, block_size = model.context_length, (8, 16, 32)[list(CONFIGS).index(name) % 3]

    def twin(decoder: Any, kernels: Any, dtype: torch.dtype) -> Twin:
        return Twin(decoder, kernels, nan_pool(model, block_size, dtype), dtype)

    decoder = NativeDecoder(model, rounded, length, quantised=True)
    ours = twin(decoder, native.NativeKernels(), torch.bfloat16)
    full, plain, codes = widened(path, model, rounded), ReferenceKernels(), _Int8Kernels()
    exact = twin(Decoder(model, full, plain, torch.float32, length), plain, torch.float32)
    over_codes = Decoder(model, full, codes, torch.float32, length)
    if model.tied_embeddings:  # then the packed head is the embedding too
        over_codes._embedding = _kept(over_codes._embedding)
    coded = twin(over_codes, codes, torch.float32)
    distance = cost = 0.0  # squares: to the reference over codes; of it to the one without
    for parts in PARTS:
        for plan in planned_steps(PARTS[parts], block_size, config["vocab_size"]):
            found, expected, unquantised = ours.logits(plan), coded.logits(plan), exact.logits(plan)
            assert found.isfinite().all()
            distance += float((found - expected).square().sum())
            cost += float((expected - unquantised).square().sum())
    assert distance <= 0.6 * cost
    assert decoder.weight_bytes < 0.75 * NativeDecoder(model, rounded, length).weight_bytes


@needs_native
def test_the_engine_quantises_when_asked(tmp_path: Path) -> None:
    """Off by default; with it the weights are about half, ledger and GetEngine say so; float32 weights do too."""
    for saved in ("bfloat16", "float32"):
        path = write_model(tmp_path / saved, tiny_config(torch_dtype=saved, hidden_size=512, intermediate_size=512))
        plain = make_engine(path, dtype="bfloat16")
        quantised = make_engine(path, dtype="auto", quantization="int8")
        assert isinstance(quantised._runner._decoder, NativeDecoder)
        assert quantised.memory.weight_bytes < 0.6 * plain.memory.weight_bytes
        told = facts_of(quantised, "m", generation_pb2.SamplingParameters())
        assert (told.dtype, told.quantization) == ("bfloat16", "int8")
        assert facts_of(plain, "m", generation_pb2.SamplingParameters()).quantization == "none"
        assert len(finish_all(quantised, make_request())[1]) == 8


@pytest.mark.parametrize(
    "changes",
    [{"kernels": "torch"}, {"deterministic": True}, {"dtype": "float32"}, {"device": "cuda"}, {"tensor_parallel": 2}],
)
def test_settings_that_exclude_it_are_named(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Before anything is read."""
    with pytest.raises(ValueError, match=f"quantization is 'int8' with {next(iter(changes))}"):
        make_engine(tmp_path, **{"dtype": "auto", "quantization": "int8", **changes})


def test_it_is_refused_where_the_processor_or_the_model_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reason; never computed in another way."""
    odd = write_model(tmp_path / "odd", tiny_config(head_dim=10))
    with pytest.raises(ValueError, match=r"quantization is 'int8'.*'head_dim': 10"):
        make_engine(odd, dtype="auto", quantization="int8")
    monkeypatch.setattr(native, "_state", ["the processor has no AVX2"])
    with pytest.raises(ValueError, match=r"quantization is 'int8'.*the processor has no AVX2"):
        make_engine(write_model(tmp_path / "llama", tiny_config()), dtype="auto", quantization="int8")
