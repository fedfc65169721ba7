"""Log probabilities of the prompt are those of transformers, however the prompt was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.outputs import RequestOutput
from services.engine.request import FinishReason, PreemptReason, Request, SamplingParams
from tests.engine.factories import SymbolicEngine, make_engine, make_request, step_outputs, tiny_config, write_model

PROMPT = [(11 * i * i + 3 * i) % 97 for i in range(53)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), tiny_config())


@pytest.fixture(scope="module")
def reference(model: Path) -> torch.Tensor:
    """[tokens - 1, vocabulary] log-softmax of transformers after each token of the prompt but the last."""
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()(torch.tensor([PROMPT])).logits
    return logits[0, :-1].log_softmax(-1)


def _asking(request_id: int = 1, count: int = 3, prompt: list[int] = PROMPT, **changes: Any) -> Request:
    sampling = SamplingParams(temperature=0.0, prompt_logprobs=count)
    return make_request(request_id, prompt=prompt, sampling=sampling, **changes)


def _check(outputs: list[RequestOutput], reference: torch.Tensor, count: int = 3) -> None:
    (first,) = [output for output in outputs if output.prompt_logprobs is not None]
    assert first is outputs[0]
    assert first.token_ids
    assert list(first.prompt_ids or ()) == PROMPT[1:]
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(PROMPT) - 1
    for place, entry in enumerate(first.prompt_logprobs):
        assert entry.logprob == pytest.approx(float(reference[place, PROMPT[place + 1]]), abs=1e-3)
        assert len(entry.top_ids) == count
        for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            assert logprob == pytest.approx(float(reference[place, token_id]), abs=1e-3)
            assert logprob <= 0


@pytest.mark.parametrize("chunk", [1, 7, 16, 17, None])
@pytest.mark.parametrize("kernels", ["cpu", "reference"])
def test_they_equal_transformers(model: Path, reference: torch.Tensor, chunk: int | None, kernels: str) -> None:
    """Whatever the chunks, cold and with the prompt in the cache, which such a request does not use."""
    engine = make_engine(model, max_chunk_tokens=chunk, kernels=kernels)
    for request_id in (1, 2):
        request = _asking(request_id)
        engine.add(request)
        _check(step_outputs(engine), reference)
        assert request.clock.cached_token_count == 0


@pytest.mark.parametrize("count", [0, 97])
def test_none_or_all_alternatives(model: Path, reference: torch.Tensor, count: int) -> None:
    """0 gives the tokens' own; the whole vocabulary is allowed here."""
    engine = make_engine(model)
    engine.add(_asking(count=count))
    _check(step_outputs(engine), reference, count)


def test_its_blocks_serve_others(model: Path) -> None:
    """It finds nothing in the cache, but fills it."""
    engine = make_engine(model)
    engine.add(_asking(1))
    step_outputs(engine)
    later = make_request(2, prompt=PROMPT)
    engine.add(later)
    step_outputs(engine)
    assert later.clock.cached_token_count == 48


def test_a_prompt_of_one_token_has_none(model: Path) -> None:
    """There is no token after the first; the field is there and empty."""
    engine = make_engine(model)
    engine.add(_asking(prompt=[5]))
    assert step_outputs(engine)[0].prompt_logprobs == ()


def test_a_preemption_neither_loses_nor_doubles_them(model: Path, reference: torch.Tensor) -> None:
    """Preempted in the middle of its prompt, it goes on with the rows that are still wanted."""
    engine = make_engine(model, max_chunk_tokens=10)
    request = _asking()
    engine.add(request)
    outputs = [*engine.step().outputs, *engine.step().outputs]
    assert len(request.prompt_logprobs) == 20
    engine._scheduler.roster.preempt(request, PreemptReason.KV, 1)
    _check([*outputs, *step_outputs(engine)], reference)
    assert request.clock.preemption_count == 1


def test_equal_prompts_that_ask_do_not_wait_for_each_other() -> None:
    """Waiting for another's blocks would gain nothing, so both are computed at once."""
    engine = SymbolicEngine(block_count=64, max_num_batched_tokens=64, max_chunk_tokens=64)
    engine.add(make_request(1, prompt=range(30)))
    engine.add(_asking(2, prompt=list(range(30))))
    step = engine.step()
    assert step is not None
    assert step.counts == [30, 30]
    assert [count for _, count in step.explained] == [29]


def test_rows_that_are_not_finite_end_the_request_alone(model: Path) -> None:
    """NaN among the prompt's logits is ERROR for it; its neighbour is answered."""
    engine = make_engine(model)
    logits = engine._runner._decoder.logits

    def poisoned(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        found = logits(hidden, rows)
        return torch.full_like(found, float("nan")) if len(rows) > 2 else found

    engine._runner._decoder.logits = poisoned  # type: ignore[method-assign]
    victim, other = _asking(1), make_request(2)
    engine.add(victim)
    engine.add(other)
    step_outputs(engine)
    assert (victim.finish, other.finish) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert "not finite" in str(victim.error)
