"""The extension chooses what the sampler in Python chooses, whatever is asked and whatever the logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.native_sampler import NativeSampler
from services.engine.plan import Sampled
from services.engine.request import SamplingParams
from services.engine.sampler import Sampler
from services.engine.step import LogitRow
from tests.engine.factories import make_engine, make_request, tiny_config, write_model
from tests.engine.kernels.test_native import needs_native, ways

EOS = frozenset({0})
SIZES = (1, 3, 15, 16, 17, 63, 64, 65, 1000, 5003)  # around a vector, a block, and more blocks than one
MAKES = ("normal", "peaked", "flat", "ties", "holes", "bfloat16", "equal", "huge")

pytestmark = needs_native


@pytest.fixture(autouse=True, scope="module", params=ways()[:2])
def _way(request: pytest.FixtureRequest) -> Iterator[None]:
    """AVX2, and the least AVX-512: the others have the same sampler."""
    torch.ops.headrace.use_instruction_set(request.param)
    yield
    torch.ops.headrace.use_instruction_set("")


def _logits(make: str, size: int, seed: int) -> torch.Tensor:
    random = torch.randn(size, generator=torch.Generator().manual_seed(seed))
    if make == "peaked":
        random[seed % size] += 40
    holes = torch.where(random < -0.5, -math.inf, random)
    holes[seed % size] = 1.0
    return {
        "normal": random * 3,
        "peaked": random,
        "flat": random * 0.01,
        "ties": (random * 2).round(),
        "holes": holes,
        "bfloat16": (random * 3).bfloat16().float(),
        "equal": torch.full((size,), 0.5),
        "huge": random * 1e30,
    }[make]


def _ids(size: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, size - 1), max_size=6).map(tuple)


@st.composite
def _cases(draw: st.DrawFn, size: int) -> tuple[LogitRow, torch.Tensor]:
    """A row of logits and a request for it: each parameter is off half of the time."""

    def maybe(value: st.SearchStrategy[Any], off: Any) -> Any:
        return draw(value) if draw(st.booleans()) else off

    temperatures = st.sampled_from([1e-5, 0.01, 0.2, 0.7, 1.0, 1.5, 30.0])
    sampling = SamplingParams(
        temperature=maybe(temperatures, 0.0),
        top_k=maybe(st.sampled_from([-1, 1, 2, 5, 50, 79, size - 1, size, 10**6]), 0),
        top_p=maybe(st.sampled_from([1e-9, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999, 1 - 1e-9]), 1.0),
        min_p=maybe(st.sampled_from([1e-12, 1e-6, 0.05, 0.5, 1.0]), 0.0),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        repetition_penalty=maybe(st.sampled_from([0.5, 1.1, 2.0]), 1.0),
        presence_penalty=maybe(st.sampled_from([-2.0, 0.3, 2.0]), 0.0),
        frequency_penalty=maybe(st.sampled_from([-0.7, 0.1, 1.3]), 0.0),
        logit_bias=maybe(st.dictionaries(st.integers(0, size - 1), st.floats(-100, 100, width=32), max_size=4), {}),
        allowed_token_ids=maybe(_ids(size), None),
        bad_sequences=maybe(st.lists(_ids(size), max_size=3).map(tuple), ()),
        min_tokens=maybe(st.integers(1, 4), 0),
        logprobs=maybe(st.sampled_from([0, 1, 5, 70, size, size + 9]), None),
    )
    known = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=40))
    request = make_request(prompt=known[: draw(st.integers(1, len(known)))], sampling=sampling, ignore_eos=False)
    for token in known[request.prompt_count :]:
        request.tokens.append(token)
    make = draw(st.sampled_from(MAKES))
    return LogitRow(request, request.token_count), _logits(make, size, draw(st.integers(0, 10**6)))


def _equal(ours: Sampled, expected: Sampled) -> None:
    assert (ours.token_id, ours.error) == (expected.token_id, expected.error)
    assert (ours.logprobs is None) == (expected.logprobs is None)
    if ours.logprobs is not None and expected.logprobs is not None:
        assert ours.logprobs.top_ids == expected.logprobs.top_ids
        assert ours.logprobs.logprob == pytest.approx(expected.logprobs.logprob, abs=1e-5, rel=1e-6)
        assert ours.logprobs.top_logprobs == pytest.approx(expected.logprobs.top_logprobs, abs=1e-5, rel=1e-6)


@pytest.mark.parametrize("size", SIZES)
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_every_row_gets_what_python_gives_it(size: int, data: st.DataObject) -> None:
    """All parameters together, over normal, peaked, flat, tied, equal, missing and enormous logits, in batches."""
    cases = data.draw(st.lists(_cases(size), min_size=1, max_size=4))
    rows, logits = [row for row, _ in cases], torch.stack([values for _, values in cases])
    expected = Sampler(EOS).sample(logits.clone(), rows)
    for ours, theirs in zip(NativeSampler(EOS).sample(logits.clone(), rows), expected, strict=True):
        _equal(ours, theirs)


@pytest.mark.parametrize("size", [7, 100, 4999])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, -1])
def test_a_row_that_is_not_finite_ends_alone(size: int, poison: float, place: int) -> None:
    """NaN or infinity anywhere in a row is its error and nobody else's; nothing but -inf too; one -inf is none."""
    rows, logits = [], []
    for number, temperature in enumerate((0.0, 1.0, 0.5, 0.0)):
        request = make_request(number, sampling=SamplingParams(temperature=temperature, seed=3, logprobs=2))
        rows.append(LogitRow(request, request.token_count))
        logits.append(_logits("normal", size, number))
    logits[1][place] = poison
    logits[2][:] = -math.inf
    given_ = torch.stack(logits)
    expected = Sampler(EOS).sample(given_.clone(), rows)
    assert [one.error is None for one in expected] == [True, poison == -math.inf, False, True]
    for ours, theirs in zip(NativeSampler(EOS).sample(given_.clone(), rows), expected, strict=True):
        _equal(ours, theirs)


@pytest.mark.parametrize("scale", [0.3, 1.0, 4.0])
def test_a_whole_vocabulary_is_drawn_from(scale: float) -> None:
    """A draw over 49,152 tokens, filtered and not, at many positions: bounds that skip tokens never skip the winner."""
    size = 49_152
    seen = set()
    for number in range(60):
        sampling = SamplingParams(temperature=1.0, seed=number, top_p=(1.0, 0.9)[number % 2])
        request = make_request(number, prompt=range(1, 2 + number), sampling=sampling)
        row, logits = LogitRow(request, request.token_count), (_logits("normal", size, number) * scale)[None]
        (ours,), (theirs,) = (
            NativeSampler(EOS).sample(logits.clone(), [row]),
            Sampler(EOS).sample(logits.clone(), [row]),
        )
        assert ours == theirs
        seen.add(ours.token_id)
    assert len(seen) > 10


def test_an_id_outside_the_vocabulary_is_that_rows_error() -> None:
    """Nothing is written where it points."""
    for changes in ({"logit_bias": {900: 1.0}}, {"allowed_token_ids": (3, -1)}, {"repetition_penalty": 2.0}):
        prompt = (5, 900) if "repetition_penalty" in changes else (5,)
        bad = make_request(1, prompt=prompt, sampling=SamplingParams(temperature=0.0, **changes))
        good = make_request(2, prompt=(5,), sampling=SamplingParams(temperature=0.0))
        rows = [LogitRow(request, request.token_count) for request in (bad, good)]
        results = NativeSampler(EOS).sample(torch.arange(200.0).reshape(2, 100), rows)
        assert results[0].error is not None
        assert "outside the vocabulary" in results[0].error
        assert results[1] == Sampled(99)


def test_what_does_not_fit_is_refused() -> None:
    """Tensors of the wrong shape or type are an error before anything is read."""
    logits = torch.zeros(2, 10)
    good = [logits, np.ones((2, 6)), np.zeros((2, 6), np.int64), np.zeros((2, 4), np.int64)]
    tensors = [torch.as_tensor(one) for one in good] + [torch.empty(0, dtype=torch.int32), torch.empty(0)]
    torch.ops.headrace.sample(*tensors)
    for place, wrong in (
        (0, logits.double()),
        (1, torch.ones(2, 5).double()),
        (2, torch.zeros(2, 6)),
        (3, tensors[3] + 1),
    ):
        with pytest.raises(RuntimeError):
            torch.ops.headrace.sample(*tensors[:place], wrong, *tensors[place + 1 :])


def test_it_is_used_where_the_extension_is(tmp_path: Path) -> None:
    """Whatever the number format; where its operators are not wanted, the one in Python chooses."""
    path = write_model(tmp_path, tiny_config())
    for changes, kind in (
        ({"dtype": "float32"}, NativeSampler),
        ({"dtype": "bfloat16"}, NativeSampler),
        ({"kernels": "torch"}, Sampler),
        ({"deterministic": True}, Sampler),
    ):
        assert type(make_engine(path, **changes)._runner._sampler) is kind
