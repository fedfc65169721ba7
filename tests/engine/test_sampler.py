"""The sampler against a reference written by hand, row by row, with no vector tricks."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import torch

from services.engine.plan import Sampled
from services.engine.randomness import gumbel
from services.engine.request import Request, SamplingParams
from services.engine.sampler import Sampler
from services.engine.step import LogitRow
from tests.engine.factories import make_request

VOCAB = 1200
EOS = frozenset({2})


def _row(seed: int = 0, scale: float = 3.0, size: int = VOCAB) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def _request(output: tuple[int, ...] = (), request_id: int = 1, **sampling: Any) -> Request:
    changes = {name: sampling.pop(name) for name in ("stop_token_ids", "ignore_eos", "prompt") if name in sampling}
    request = make_request(
        request_id,
        max_tokens=50,
        sampling=SamplingParams(**{"seed": 5, **sampling}),
        **{"ignore_eos": False, "prompt": (5, 6, 7), **changes},
    )
    for token in output:
        request.tokens.append(token)
    return request


def _sample(rows: list[torch.Tensor], requests: list[Request]) -> list[Sampled]:
    return Sampler(EOS).sample(torch.stack(rows), [LogitRow(request, request.token_count) for request in requests])


def _reference_logits(row: torch.Tensor, request: Request) -> list[float]:
    """Bias, allowed, min_tokens, penalties, in Python floats."""
    s = request.sampling
    logits = [float(value) for value in row]
    for token, bias in s.logit_bias.items():
        logits[token] += bias
    if s.allowed_token_ids is not None:
        logits = [v if t in s.allowed_token_ids else -math.inf for t, v in enumerate(logits)]
    if request.output_count < s.min_tokens:
        for token in (*EOS, *request.stop_token_ids):
            logits[token] = -math.inf
    known, output = request.tokens.view.tolist(), request.output_ids.tolist()
    for token in set(known):
        logits[token] = (
            logits[token] / s.repetition_penalty if logits[token] > 0 else logits[token] * s.repetition_penalty
        )
    for token in set(output):
        logits[token] -= s.presence_penalty + s.frequency_penalty * output.count(token)
    return logits


def _reference(row: torch.Tensor, request: Request) -> int:
    """Every parameter in the order of the policies, in Python floats."""
    s = request.sampling
    logits = _reference_logits(row, request)
    if s.greedy:
        return max(range(len(logits)), key=lambda t: (logits[t], -t))
    peak = max(logits)
    weights = {t: math.exp((v - peak) / s.temperature) for t, v in enumerate(logits)}
    weights = {t: w for t, w in weights.items() if w > 0 and w >= s.min_p}
    ranked = sorted(weights, key=lambda t: (-weights[t], t))
    if s.top_k > 0:
        ranked = ranked[: s.top_k]
    total, kept, mass = sum(weights[t] for t in ranked), [], 0.0
    for token in ranked:
        kept.append(token)
        mass += weights[token]
        if s.top_p < 1 and mass >= s.top_p * total:
            break
    noise = gumbel(request.seed, request.token_count, np.array(kept))
    sums = [math.log(weights[token]) + noise[place] for place, token in enumerate(kept)]
    return kept[sums.index(max(sums))]


PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 50.0},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 600},
    {"top_k": 10**9},
    {"top_k": -1},
    {"top_p": 0.9},
    {"top_p": 1e-9},
    {"top_p": 0.9, "temperature": 30.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-6, "temperature": 20.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 0.8},
    {"repetition_penalty": 1.4, "temperature": 0.7},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"frequency_penalty": -1.0, "temperature": 0.0},
    {"logit_bias": {9: 8.0, 11: -100.0}},
    {"allowed_token_ids": (3, 4, 900)},
    {"allowed_token_ids": (3, 4, 900), "top_p": 0.7},
    {"min_tokens": 30, "logit_bias": {2: 100.0}},
    {"min_tokens": 30, "stop_token_ids": (8, 9), "logit_bias": {2: 50.0, 8: 50.0, 9: 50.0, 10: 20.0}},
]


@pytest.mark.parametrize("parameters", PARAMETERS, ids=lambda p: ",".join(f"{k}={v}" for k, v in p.items()))
def test_twenty_steps_of_each_parameter_equal_the_reference(parameters: dict[str, Any]) -> None:
    """Alone and among rows with other parameters, each step's token is the reference's."""
    request = _request(**parameters)
    others = [_request(request_id=9 + i, **p) for i, p in enumerate(({"temperature": 0.0}, {"top_p": 0.5}))]
    for step in range(20):
        row = _row(step)
        expected = _reference(row, request)
        alone = _sample([row], [request])[0]
        batched = _sample([_row(98), row, _row(99)], [others[0], request, others[1]])[1]
        assert alone == batched
        assert alone.token_id == expected
        request.tokens.append(expected)


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """No garbage and no NaN on the way to zero."""
    for seed in range(20):
        row = _row(seed)
        assert _sample([row], [_request(temperature=temperature)])[0].token_id == int(row.argmax())


def test_a_tie_is_cut_by_id_and_top_k_one_is_greedy() -> None:
    """With equal logits everywhere the lowest ids are kept, however many candidates tie."""
    row = torch.zeros(VOCAB)
    tokens = {_sample([row.clone()], [_request(top_k=3, seed=seed)])[0].token_id for seed in range(60)}
    assert tokens == {0, 1, 2}
    assert _sample([row], [_request(top_k=1)])[0].token_id == 0


def test_a_greedy_row_is_untouched_by_its_neighbours() -> None:
    """A mixed batch with bans and temperatures leaves a greedy row's choice alone."""
    rows = [_row(1), _row(2), _row(3)]
    requests = [
        _request(allowed_token_ids=(4,), temperature=1.0),
        _request(temperature=0.0),
        _request(logit_bias={5: -math.inf}, temperature=0.01),
    ]
    results = _sample([row.clone() for row in rows], requests)
    assert results[0].token_id == 4
    assert results[1].token_id == int(rows[1].argmax())
    assert all(result.error is None for result in results)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_fails_ends_alone(poison: float, temperature: float) -> None:
    """NaN or Inf in one row is that row's error; the others' tokens do not change."""
    bad = _row(7)
    bad[3] = poison
    rows = [_row(1), bad, _row(2)]
    requests = [_request(temperature=temperature, logprobs=1), _request(), _request(temperature=temperature)]
    results = _sample(rows, requests)
    assert results[1].error is not None
    for index in (0, 2):
        assert results[index].token_id == _reference(rows[index], requests[index])
    plain = [_request(temperature=0.0) for _ in rows]
    assert [result.error is None for result in _sample(rows, plain)] == [True, False, True]


def test_no_token_left_is_an_error_of_that_row() -> None:
    """Allowed ids that min_tokens forbids leave nothing to choose."""
    result = _sample([_row()], [_request(allowed_token_ids=(2,), min_tokens=4)])[0]
    assert result.error == "no token is left to choose from"


def test_an_exception_in_one_row_ends_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong while a row is shaped or drawn, the others get their tokens."""
    shape = Sampler._shape

    def failing(self: Sampler, logits: torch.Tensor, row: LogitRow) -> None:
        if row.request.request_id == 2:
            raise RuntimeError("out of luck")
        shape(self, logits, row)

    monkeypatch.setattr(Sampler, "_shape", failing)
    results = _sample([_row(1), _row(2)], [_request(), _request(request_id=2)])
    assert results[0].error is None
    assert results[1].error == "shaping the logits failed: out of luck"


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB])
@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"top_k": 1},
        {"temperature": 0.01, "top_p": 0.3},
        {"logit_bias": {7: 100.0}},
        {"allowed_token_ids": (3,)},
    ],
)
def test_logprobs_are_of_the_raw_softmax(count: int, sampling: dict[str, Any]) -> None:
    """Finite, at most 0, the chosen token always present, independent of filters; JSON takes them."""
    row = _row(4)
    row[11] = -math.inf
    expected = row.log_softmax(-1)
    result = _sample([row.clone()], [_request(logprobs=count, **sampling)])[0]
    assert result.logprobs is not None
    assert result.logprobs.logprob == pytest.approx(float(expected[result.token_id]), abs=1e-4)
    assert len(result.logprobs.top_ids) == count
    for token, value in zip(result.logprobs.top_ids, result.logprobs.top_logprobs, strict=True):
        assert value == pytest.approx(max(-9999.0, float(expected[token])), abs=1e-4)
        assert value <= 0
    assert list(result.logprobs.top_logprobs) == sorted(result.logprobs.top_logprobs, reverse=True)
    json.dumps(asdict(result), allow_nan=False)


def test_bad_sequences_cannot_be_completed() -> None:
    """The last token of a bad sequence is impossible right after its beginning, and only there."""
    row = torch.zeros(VOCAB)
    row[9], row[8] = 5.0, 4.0
    bad = ((7, 9), (6,))
    assert _sample([row], [_request((7,), temperature=0.0, bad_sequences=bad)])[0].token_id == 8
    assert _sample([row], [_request((5,), temperature=0.0, bad_sequences=bad)])[0].token_id == 9
    row[6] = 9.0
    assert _sample([row], [_request((), temperature=0.0, bad_sequences=bad)])[0].token_id == 9


def test_the_same_seed_draws_the_same_at_the_same_position() -> None:
    """A resumed request (its output now part of the prompt) draws what it would have drawn."""
    row = _row(2)
    first = _sample([row], [_request((20, 21), prompt=(5, 6, 7))])[0].token_id
    again = _sample([row], [_request((21,), prompt=(5, 6, 7, 20))])[0].token_id
    assert first == again
