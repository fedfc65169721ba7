"""Every sampling parameter on the default model's own logits, against a reference written by hand in float64.

All rows run in one batch of the real engine. The reference sees what the model gave for a row, before anything was
done to it, and applies the order of the policies: bias, allowed, bad sequences, min_tokens, penalties, temperature,
min_p, top_k, top_p, draw.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from services.engine.engine import Engine, EngineConfig
from services.engine.randomness import gumbel
from services.engine.request import Request, SamplingParams

STEPS = 20
PROMPT = (504, 3575, 282, 4649, 314)  # "The capital of France is"
FRENCH = (7042, 28, 216)  # likely words here
EOS = 2
TABLE: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.2": {"temperature": 0.2},
    "temperature 1": {"temperature": 1.0},
    "temperature 5": {"temperature": 5.0},
    "top_k 1": {"top_k": 1},
    "top_k 5": {"top_k": 5},
    "top_k 2000": {"top_k": 2000, "temperature": 3.0},
    "top_k -1": {"top_k": -1},
    "top_p 0.1": {"top_p": 0.1},
    "top_p 0.9": {"top_p": 0.9},
    "top_p 0.99, flat": {"top_p": 0.99, "temperature": 4.0},
    "min_p 0.1": {"min_p": 0.1},
    "min_p 1": {"min_p": 1.0},
    "all filters": {"top_k": 50, "top_p": 0.8, "min_p": 0.01, "temperature": 1.3},
    "repetition 1.5": {"repetition_penalty": 1.5, "temperature": 0.0},
    "repetition 0.8": {"repetition_penalty": 0.8, "temperature": 0.7},
    "presence": {"presence_penalty": 2.0, "temperature": 0.0},
    "frequency": {"frequency_penalty": 1.0, "temperature": 0.0},
    "negative frequency": {"frequency_penalty": -2.0},
    "bias": {"logit_bias": {5000: 12.0, FRENCH[0]: -100.0}},
    "allowed": {"allowed_token_ids": (*FRENCH, 5000, 41, 999)},
    "bad sequences": {"bad_sequences": ((FRENCH[0],), (28, 216), (30,)), "temperature": 0.0},
    "min_tokens": {"min_tokens": 15, "logit_bias": {EOS: 100.0}, "temperature": 0.0},
    "min_tokens, stop id": {"min_tokens": 10, "logit_bias": {5000: 100.0, EOS: 90.0}, "stop_token_ids": (5000,)},
    "everything": {
        "temperature": 0.9,
        "top_k": 100,
        "top_p": 0.95,
        "min_p": 0.001,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {28: 2.0, 30: -2.0},
        "bad_sequences": ((216, 34),),
        "min_tokens": 19,
    },
}


def _reference(raw: NDArray[np.float64], request: Request) -> int:
    s, output = request.sampling, request.output_ids.tolist()
    logits = raw.copy()
    for token, bias in s.logit_bias.items():
        logits[token] += bias
    if s.allowed_token_ids is not None:
        logits[np.setdiff1d(np.arange(logits.size), s.allowed_token_ids)] = -np.inf
    for *head, last in s.bad_sequences:
        if not head or output[-len(head) :] == head:
            logits[last] = -np.inf
    if len(output) < s.min_tokens:
        logits[[EOS, *request.stop_token_ids]] = -np.inf
    for token in set(request.tokens.view.tolist()):
        logits[token] *= 1 / s.repetition_penalty if logits[token] > 0 else s.repetition_penalty
    for token in set(output):
        logits[token] -= s.presence_penalty + s.frequency_penalty * output.count(token)
    if s.temperature < 1e-5:
        return int(logits.argmax())
    logits = (logits - logits.max()) / s.temperature
    ranked = np.argsort(-logits, kind="stable") if s.min_p or s.top_k > 0 or s.top_p < 1 else np.arange(logits.size)
    ranked = ranked[np.exp(logits[ranked]) >= s.min_p]
    if s.top_k > 0:
        ranked = ranked[: s.top_k]
    if s.top_p < 1:
        mass = np.exp(logits[ranked]).cumsum()
        ranked = ranked[: int(np.searchsorted(mass, s.top_p * mass[-1])) + 1]
    kept = np.sort(ranked)
    return int(kept[(logits[kept] + gumbel(request.seed, request.token_count, kept)).argmax()])


def _request(place: int, name: str) -> Request:
    fields = dict(TABLE[name])
    stops = fields.pop("stop_token_ids", ())
    return Request(place, PROMPT, max_tokens=STEPS, sampling=SamplingParams(seed=place, **fields), stop_token_ids=stops)


@pytest.fixture(scope="module")
def compared(default_model_dir: Path) -> dict[str, list[tuple[int, int]]]:
    """Of each row of the table: the engine's tokens and the reference's, step by step."""
    engine = Engine.load(
        EngineConfig(default_model_dir, dtype="float32", kv_blocks=256, threads=2, num_speculative_tokens=0)
    )
    requests = [_request(place, name) for place, name in enumerate(TABLE)]
    expected: dict[int, list[int]] = {request.request_id: [] for request in requests}
    launch = engine._runner.launch
    run = engine._runner.run

    def watching(planned: Any) -> Any:
        def recording(plan: Any) -> Any:
            hidden, logits = run(plan)
            for values, row in zip(logits.double().numpy(), planned.sampled, strict=True):
                expected[row.request.request_id].append(_reference(values, row.request))
            return hidden, logits

        engine._runner.run = recording  # type: ignore[method-assign]
        return launch(planned)

    engine._runner.launch = watching  # type: ignore[method-assign]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    assert all(request.error is None for request in requests)
    return {
        name: list(zip(request.output_ids.tolist(), expected[place], strict=True))
        for place, (name, request) in enumerate(zip(TABLE, requests, strict=True))
    }


@pytest.mark.parametrize("name", TABLE)
def test_twenty_steps_on_real_logits(compared: dict[str, list[tuple[int, int]]], name: str) -> None:
    """Each token is the reference's; a row ends early only by an end-of-sequence or stop token."""
    steps = compared[name]
    assert [found for found, _ in steps] == [wanted for _, wanted in steps]
    assert len(steps) == STEPS or steps[-1][0] in (EOS, 5000)


def test_min_tokens_are_exactly_as_many(compared: dict[str, list[tuple[int, int]]]) -> None:
    """With the end forced by a bias, it comes right after the fewest tokens allowed."""
    assert len(compared["min_tokens"]) == 16
    assert len(compared["min_tokens, stop id"]) == 11
