"""Figures of one engine on one device, each beside what the device does at best. Knows no goals."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from services.engine.engine import Engine
from services.engine.request import SamplingParams
from tests.engine.factories import make_request

_ROUNDS = 5


@dataclass(frozen=True)
class Streams:
    """What readers see where so many requests arrive at once."""

    count: int
    first_token_s: float
    """Median over requests."""
    token_s: float
    """Median over the steps in which all decode."""
    context: float
    """Mean tokens that a sequence attended to in these steps."""
    tokens_per_s: float
    """Output tokens over the whole time."""


def median_s(work: Callable[[], object], device: torch.device) -> float:
    """Seconds that work on the device takes: median of several, after one that is not counted."""
    taken = []
    for _ in range(_ROUNDS + 1):
        settle(device)
        begun = time.perf_counter()
        work()
        settle(device)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[1:])


def settle(device: torch.device) -> None:
    """Wait until the device has nothing to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second that a copy of ``size`` bytes reads and writes."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_s(lambda: target.copy_(source), device)


def matmul_rate(device: torch.device, width: int) -> float:
    """Operations a second of a square product in bfloat16."""
    left, right = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    return 2 * width**3 / median_s(lambda: left @ right, device)


def prefill_s(engine: Engine, tokens: int) -> float:
    """Seconds from an idle engine to the first token of a prompt of so many tokens."""

    def work() -> None:
        engine.add(make_request(1, prompt=_prompt(engine, 0, tokens), max_tokens=1))
        while engine.has_work:
            engine.step()

    return median_s(work, engine._runner.kv[0].device)


def streams(engine: Engine, count: int, prompt: int, output: int) -> Streams:
    """Let requests arrive at once, every other one drawn at random, and read until all have ended."""
    for i in range(count):
        sampling = SamplingParams(temperature=float(i % 2), seed=i)
        engine.add(make_request(i, prompt=_prompt(engine, i, prompt), max_tokens=output, sampling=sampling))
    begun = last = time.perf_counter()
    first: dict[int, float] = {}
    steps: list[float] = []
    contexts: list[int] = []
    made = [0] * count
    while engine.has_work:
        told = engine.step()
        now = time.perf_counter()
        for news in told.outputs:
            first.setdefault(news.request_id, now - begun)
            made[news.request_id] += len(news.token_ids)
        if told.facts is not None and told.facts.decode_token_count == count:
            steps.append(now - last)
            contexts.append(prompt + sum(made) // count)
        last = now
    return Streams(
        count=count,
        first_token_s=statistics.median(first.values()),
        token_s=statistics.median(steps),
        context=statistics.fmean(contexts),
        tokens_per_s=sum(made) / (last - begun),
    )


def unsteady(engine: Engine, count: int, prompt: int, output: int) -> str | None:
    """What is wrong while so many requests decode: memory that grows, or a host that waits for more than the ids.

    On a CPU nothing is looked at.
    """
    watched = engine._runner.kv[0].device.type == "cuda"
    requests = [make_request(i, prompt=_prompt(engine, i, prompt), max_tokens=output) for i in range(count)]
    for request in requests:
        request.sampling = SamplingParams(temperature=float(request.request_id % 2), top_p=0.9, seed=1)
        engine.add(request)
    while any(request.output_count < 2 for request in requests):
        engine.step()
    before = torch.cuda.memory_reserved() if watched else 0
    if watched:
        torch.cuda.set_sync_debug_mode("error")
    try:
        while engine.has_work:
            engine.step()
    finally:
        if watched:
            torch.cuda.set_sync_debug_mode("default")
    grown = torch.cuda.memory_reserved() - before if watched else 0
    errors = [request.error for request in requests if request.error is not None]
    return errors[0] if errors else f"the allocator took {grown} bytes more" if grown > 0 else None


@torch.inference_mode()
def transformers_tokens_per_s(model: Any, count: int, prompt: int, output: int) -> float:
    """Output tokens a second of ``generate`` on one static batch; the second of two runs."""
    width = model.config.vocab_size
    ids = torch.tensor([[(7 * i + 3 * j) % width for j in range(prompt)] for i in range(count)], device=model.device)
    taken = 0.0
    for _ in range(2):
        begun = time.perf_counter()
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
            pad_token_id=0,
        )
        settle(model.device)
        taken = time.perf_counter() - begun
    return count * (made.shape[1] - prompt) / taken


def _prompt(engine: Engine, number: int, length: int) -> list[int]:
    return [(7 * number + 3 * place) % engine.model.vocab_size for place in range(length)]
