"""In deterministic mode ids and log probabilities are the same, bit for bit, whatever happens around a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.engine import Engine, EngineConfig
from services.engine.kernels import CpuKernels, DeterministicKernels, ReferenceKernels
from services.engine.kernels.deterministic import TILES, _safe_rows
from services.engine.request import Request, SamplingParams
from tests.engine.factories import make_engine, make_request, tiny_config, write_model

PROMPT = [(11 * i * i + 3 * i) % 997 for i in range(150)]
SAMPLINGS = (
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=1.0, top_p=0.9, seed=3, logprobs=5),
)
Answer = tuple[tuple[int, ...], tuple[float, ...]]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def engine_options(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Sizes that are no multiples of a vector, so that products and loops have remainders."""
    config = tiny_config(
        vocab_size=997,
        hidden_size=176,
        intermediate_size=330,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=24,
    )
    path = write_model(tmp_path_factory.mktemp("tiny"), config)
    return {"path": path, "dtype": request.param, "deterministic": True, "kv_blocks": 256}


def _target(request_id: int, sampling: SamplingParams, **changes: Any) -> Request:
    return make_request(request_id, prompt=PROMPT, max_tokens=12, sampling=sampling, **changes)


def _answer(engine: Engine, target: Request, *others: Request, delay: int = 0) -> Answer:
    """Ids and every log probability of one request among others."""
    for other in others:
        engine.add(other)
    for _ in range(delay):
        engine.step()
    engine.add(target)
    ids: list[int] = []
    numbers: list[float] = []
    while target.finish is None:
        for output in engine.step().outputs:
            if output.request_id == target.request_id:
                ids += output.token_ids
                for entry in output.logprobs or ():
                    numbers += [entry.logprob, *entry.top_logprobs]
    assert target.error is None
    for other in others:
        engine.abort(other.request_id)
    engine.step()
    return tuple(ids), tuple(numbers)


def _company(count: int) -> list[Request]:
    return [
        make_request(100 + i, prompt=[(7 * i + k * k) % 997 for k in range(1 + 37 * i % 90)], max_tokens=60)
        for i in range(count)
    ]


def _check(options: dict[str, Any], sampling: SamplingParams, chunks: tuple[int | None, ...], counts: Any) -> None:
    path = options["path"]
    options = {**options, "max_num_batched_tokens": 200}
    del options["path"]
    answers: set[Answer] = set()
    for chunk in chunks:
        engine = make_engine(path, max_chunk_tokens=chunk, **options)
        cold, cached = _target(1, sampling), _target(2, sampling)
        answers.add(_answer(engine, cold))
        answers.add(_answer(engine, cached))
        assert (cold.clock.cached_token_count, cached.clock.cached_token_count) == (0, 144)
    for count in counts:
        for delay in (0, 4):
            engine = make_engine(path, **options)
            answers.add(_answer(engine, _target(1, sampling), *_company(count), delay=delay))
    assert len(answers) == 1


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "random"])
def test_bits_depend_on_the_request_alone(engine_options: dict[str, Any], sampling: SamplingParams) -> None:
    """Batch sizes 1 to 8, chunks 1, 7, 16, 17 and whole, cold and cached, mixed with prefill and decode: one answer."""
    _check(engine_options, sampling, (1, 7, 16, 17, None), (1, 3, 7))


def test_bits_depend_on_the_request_alone_with_two_threads(engine_options: dict[str, Any]) -> None:
    """The same where operations are shared out."""
    _check({**engine_options, "threads": 2}, SAMPLINGS[0], (7, None), (3,))


def test_prompt_logprobs_are_the_same_bits(engine_options: dict[str, Any]) -> None:
    """Whatever the chunks."""
    options = dict(engine_options)
    path = options.pop("path")
    found = set()
    for chunk in (5, 16, 64):
        engine = make_engine(path, max_chunk_tokens=chunk, **options)
        engine.add(make_request(prompt=PROMPT, max_tokens=1, sampling=SamplingParams(prompt_logprobs=2)))
        while engine.has_work:
            for output in engine.step().outputs:
                assert output.prompt_logprobs is not None
                found.add(tuple((entry.logprob, entry.top_logprobs) for entry in output.prompt_logprobs))
    assert len(found) == 1


def test_a_tile_is_safe_when_a_row_may_stand_anywhere() -> None:
    """A product that treats its first row otherwise is computed row by row; a real one is tiled."""
    weight = torch.randn(96, 80)

    def odd(x: torch.Tensor) -> torch.Tensor:
        out = x @ weight.T
        out[0] += 1e-3
        return out

    assert _safe_rows(odd, 80, torch.float32) == 1
    assert _safe_rows(CpuKernels().linear(weight, None), 80, torch.float32) in TILES


@pytest.mark.parametrize("rows", [1, 15, 16, 33])
def test_row_wise_operations_equal_the_reference(rows: int) -> None:
    """Products, normalisation, gating and rotation, padded and cut, to rounding."""
    fast, plain = DeterministicKernels(), ReferenceKernels()
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    x, weight, scale = random(rows, 40), random(24, 40), random(40)
    torch.testing.assert_close(fast.linear(weight, None)(x), plain.linear(weight, None)(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fast.rms_norm(x, scale, 1e-5), plain.rms_norm(x, scale, 1e-5))
    torch.testing.assert_close(fast.silu_mul(x), plain.silu_mul(x))
    turned = random(rows, 5, 16)  # three query heads, a key head, a value head
    again, cos, sin = turned.clone(), random(rows, 1, 16), random(rows, 1, 16)
    pools, slots = [torch.zeros(5, 8, 2, 1, 16) for _ in range(2)], torch.arange(rows)
    fast.rotate_and_store(turned, cos, sin, pools[0], slots)
    plain.rotate_and_store(again, cos, sin, pools[1], slots)
    torch.testing.assert_close(turned, again)
    torch.testing.assert_close(pools[0], pools[1])


def test_it_needs_the_cpu_kernels() -> None:
    """The reference makes no such promise."""
    with pytest.raises(ValueError, match=r"^deterministic is on"):
        EngineConfig(Path(), deterministic=True, kernels="reference")
