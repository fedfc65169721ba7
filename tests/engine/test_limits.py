"""Guarantees of admission checks: what can never run is refused with the field and the numbers."""

from __future__ import annotations

import pytest

from services.engine.limits import EngineLimits, fit_request
from services.engine.request import RequestRefused, SamplingParams
from tests.engine.factories import make_request

LIMITS = EngineLimits(context_length=100, kv_token_capacity=64, vocab_size=50, eos_token_ids=frozenset({2}))


@pytest.mark.parametrize(
    ("changes", "field", "reason", "number"),
    [
        ({"prompt": []}, "prompt", "EMPTY_PROMPT", "no tokens"),
        ({"prompt": [1, -1]}, "prompt", "OUT_OF_VOCABULARY", "-1"),
        ({"prompt": [1, 50]}, "prompt", "OUT_OF_VOCABULARY", "50"),
        ({"prompt": [1] * 100}, "prompt", "CONTEXT_LENGTH", "100"),
        ({"prompt": [1] * 65}, "prompt", "KV_CAPACITY", "64"),
        ({"prompt": [1] * 60, "max_tokens": 6}, "max_tokens", "KV_CAPACITY", "65"),
        ({"max_tokens": 0}, "max_tokens", "INVALID_VALUE", "0"),
        ({"stop_token_ids": [50]}, "stop_token_ids", "OUT_OF_VOCABULARY", "50"),
        ({"sampling": SamplingParams(temperature=float("nan"))}, "temperature", "INVALID_VALUE", "nan"),
        ({"sampling": SamplingParams(top_p=float("inf"))}, "top_p", "INVALID_VALUE", "inf"),
        ({"sampling": SamplingParams(repetition_penalty=0.0)}, "repetition_penalty", "INVALID_VALUE", ""),
        ({"fair_weight": 0.0}, "fair_weight", "INVALID_VALUE", "0"),
        ({"fair_weight": float("nan")}, "fair_weight", "INVALID_VALUE", "nan"),
        ({"sampling": SamplingParams(min_tokens=9)}, "min_tokens", "INVALID_VALUE", "9"),
        ({"sampling": SamplingParams(logprobs=51)}, "logprobs", "INVALID_VALUE", "51"),
        ({"sampling": SamplingParams(logit_bias={50: 1.0})}, "logit_bias", "OUT_OF_VOCABULARY", "50"),
        ({"sampling": SamplingParams(logit_bias={1: float("nan")})}, "logit_bias", "INVALID_VALUE", ""),
        ({"sampling": SamplingParams(allowed_token_ids=())}, "allowed_token_ids", "INVALID_VALUE", ""),
        ({"sampling": SamplingParams(bad_sequences=((1, 99),))}, "bad_sequences", "OUT_OF_VOCABULARY", "99"),
    ],
)
def test_what_cannot_run_is_refused_by_name(changes: dict, field: str, reason: str, number: str) -> None:
    """The refusal names the field, a machine word, and the offending number."""
    with pytest.raises(RequestRefused) as refused:
        fit_request(make_request(**changes), LIMITS)
    assert (refused.value.field, refused.value.reason) == (field, reason)
    assert number in str(refused.value)


@pytest.mark.parametrize(
    ("prompt", "context", "capacity", "asked", "given"),
    [
        (10, 100, 640, None, 90),
        (10, 100, 64, None, 55),
        (10, 100, 640, 200, 90),
        (10, 100, 640, 7, 7),
        (99, 100, 640, None, 1),
        (64, 100, 64, None, 1),
        (60, 100, 64, 5, 5),
    ],
)
def test_max_tokens_is_lowered_to_what_is_left(
    prompt: int, context: int, capacity: int, asked: int | None, given: int
) -> None:
    """Unset means the rest of context and pool; too large for the context means the rest of it."""
    request = make_request(prompt=[1] * prompt, max_tokens=asked)
    fit_request(request, EngineLimits(context, capacity, 50, frozenset()))
    assert request.max_tokens == given
