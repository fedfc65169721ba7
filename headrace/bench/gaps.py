"""What a long prompt costs the streams beside it: the time between two tokens of each, before it and during it."""

from __future__ import annotations

import random
import time
from typing import Any

from headrace.bench.in_process import EngineBench
from headrace.bench.results import quantile
from headrace.bench.workloads import Item, random_ids

STREAM_PROMPT_TOKENS = 64
ONE_TOKEN_A_STEP = {"HEADRACE_ENGINE_NUM_SPECULATIVE_TOKENS": "0"}  # so that a step's time is every stream's gap
SETTLING_STEPS = 10
STEADY_STEPS = 100
_LONG = -1


def measure(bench: EngineBench, streams: int, prompt_tokens: int, seed: int) -> dict[str, Any]:
    """One arrival: `streams` answers run, then a prompt comes. Milliseconds; leaves the engine idle."""
    engine = bench.engine
    draw = random.Random(seed)  # noqa: S311 - repeatable on purpose

    def add(number: int, length: int, output: int) -> None:
        bench.add(number, Item(random_ids(draw, length), output))

    for number in range(streams):
        add(number, STREAM_PROMPT_TOKENS, engine.limits.context_length - STREAM_PROMPT_TOKENS)
    for _ in range(SETTLING_STEPS):
        engine.step()
    steady = [_step_ms(bench)[0] for _ in range(STEADY_STEPS)]
    arrived = time.monotonic()
    add(_LONG, prompt_tokens, 1)
    gaps: list[float] = []
    done = False
    while not done:
        gap_ms, done = _step_ms(bench)
        gaps.append(gap_ms)
    first_token_ms = (time.monotonic() - arrived) * 1e3
    engine.abort_all()
    engine.step()
    middle, worst = quantile(steady, 0.5), quantile(gaps, 0.99)
    return {
        "steady_ms": middle,
        "gap_ms": {"p50": quantile(gaps, 0.5), "p99": worst},
        "p99_to_steady": worst / middle,
        "steps": len(gaps),
        "first_token_ms": first_token_ms,
    }


def _step_ms(bench: EngineBench) -> tuple[float, bool]:
    """A step's time, which is every stream's gap; and whether the long prompt has its token."""
    begun = time.monotonic()
    outputs = bench.engine.step().outputs
    return (time.monotonic() - begun) * 1e3, any(output.request_id == _LONG for output in outputs)
