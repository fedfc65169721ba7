"""What the engine can serve, and the check of a request against it before it may wait.

Knows no queue, no blocks and no tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from services.engine.request import Request, RequestRefused

_POSITIVE = {"repetition_penalty", "fair_weight"}


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The fixed bounds of a loaded engine."""

    context_length: int
    """Most tokens of prompt and output together."""
    kv_token_capacity: int
    """Tokens that the whole KV pool holds."""
    vocab_size: int
    """Token ids are below this."""
    eos_token_ids: frozenset[int]
    """Ids that end an answer."""


def fit_request(request: Request, limits: EngineLimits) -> None:
    """Check a request and lower ``max_tokens`` to what can be generated.

    The last generated token is never attended to, so it needs no room in the pool.

    Raises:
        RequestRefused: naming the field, the reason and the numbers.
    """
    _check_tokens(request, limits)
    prompt = request.prompt_count
    if prompt >= limits.context_length:
        raise RequestRefused(
            "prompt",
            "CONTEXT_LENGTH",
            f"the prompt has {prompt} tokens; with at least one of output it must fit the context of "
            f"{limits.context_length}",
        )
    if prompt > limits.kv_token_capacity:
        raise RequestRefused(
            "prompt",
            "KV_CAPACITY",
            f"the prompt has {prompt} tokens; the KV pool holds {limits.kv_token_capacity}",
        )
    in_context = limits.context_length - prompt
    in_pool = limits.kv_token_capacity - prompt + 1
    if request.max_tokens is None:
        request.max_tokens = min(in_context, in_pool)
    elif request.max_tokens < 1:
        raise RequestRefused("max_tokens", "INVALID_VALUE", f"max_tokens is {request.max_tokens}; it must be positive")
    else:
        request.max_tokens = min(request.max_tokens, in_context)
        if request.max_tokens > in_pool:
            raise RequestRefused(
                "max_tokens",
                "KV_CAPACITY",
                f"{prompt} prompt tokens and max_tokens {request.max_tokens} need "
                f"{prompt + request.max_tokens - 1} tokens of KV; the pool holds {limits.kv_token_capacity}",
            )
    _check_sampling(request, limits)


def _check_tokens(request: Request, limits: EngineLimits) -> None:
    if request.prompt_count == 0:
        raise RequestRefused("prompt", "EMPTY_PROMPT", "the prompt has no tokens")
    lowest, highest = int(request.prompt_ids.min()), int(request.prompt_ids.max())
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise RequestRefused("prompt", "OUT_OF_VOCABULARY", _outside(wrong, limits))


def _check_sampling(request: Request, limits: EngineLimits) -> None:
    """Defence in depth: the gateway has checked these; what would break a step is refused here too."""
    sampling = request.sampling
    numbers = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "fair_weight": request.fair_weight,
    }
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise RequestRefused(name, "INVALID_VALUE", f"{name} is {value}; it must be finite")
        if name in _POSITIVE and value <= 0:
            raise RequestRefused(name, "INVALID_VALUE", f"{name} is {value}; it must be positive")
    if request.max_tokens is not None and sampling.min_tokens > request.max_tokens:
        raise RequestRefused(
            "min_tokens",
            "INVALID_VALUE",
            f"min_tokens is {sampling.min_tokens}; at most {request.max_tokens} tokens can be generated",
        )
    for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if count is not None and not 0 <= count <= limits.vocab_size:
            raise RequestRefused(name, "INVALID_VALUE", f"{name} is {count}; it must be 0..{limits.vocab_size}")
    if sampling.allowed_token_ids is not None and not sampling.allowed_token_ids:
        raise RequestRefused("allowed_token_ids", "INVALID_VALUE", "allowed_token_ids allows nothing")
    if any(math.isnan(bias) for bias in sampling.logit_bias.values()):
        raise RequestRefused("logit_bias", "INVALID_VALUE", "a logit_bias value is NaN")
    ids = {
        "logit_bias": list(sampling.logit_bias),
        "allowed_token_ids": list(sampling.allowed_token_ids or ()),
        "stop_token_ids": list(request.stop_token_ids),
        "bad_sequences": [token for sequence in sampling.bad_sequences for token in sequence],
    }
    for name, values in ids.items():
        for token in values:
            if not 0 <= token < limits.vocab_size:
                raise RequestRefused(name, "OUT_OF_VOCABULARY", _outside(token, limits))


def _outside(token: int, limits: EngineLimits) -> str:
    return f"token id {token} is outside the vocabulary of {limits.vocab_size}"
