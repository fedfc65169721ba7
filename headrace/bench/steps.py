"""What a decode step costs beside the model: the time of a step less that inside the model's own operators.

Host overhead is everything else that `Engine.step` does: scheduling, writing the plan, making tensors of it, choosing
tokens, bookkeeping, outputs. Of it the choosing is told apart. Commands, threads and the wire are not in it. On a GPU
the operators return before they have computed, so there these are no figures.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from headrace.bench.in_process import GREEDY, EngineBench
from headrace.bench.results import quantile
from headrace.bench.workloads import Item, random_ids

PROMPT_TOKENS = 64
SAMPLINGS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "greedy": GREEDY,
        "advised": {"temperature": 0.2, "top_p": 0.9},  # by the default model's authors
        "top_k": {"temperature": 1.0, "top_k": 50},
        "drawn": {"temperature": 1.0},
        "logprobs": {"temperature": 0.0, "logprobs": 5},
        "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.5},
    }
)
_SETTLING_STEPS = 5


class StepClock:
    """Watches the steps of an engine on a CPU from outside; the engine knows nothing of it.

    Args:
        bench: whose engine.
    """

    def __init__(self, bench: EngineBench) -> None:
        self._bench = bench
        self._model_ns = self._sampler_ns = 0
        runner = bench.engine._runner  # noqa: SLF001 - the seams are inside it
        self._watch(runner._decoder, "forward", self._in_model)  # noqa: SLF001
        self._watch(runner._decoder, "logits", self._in_model)  # noqa: SLF001
        self._watch(runner._sampler, "sample", self._in_sampler)  # noqa: SLF001

    def measure(self, rows: int, sampling: str, steps: int) -> list[tuple[int, int, int]]:
        """Nanoseconds of each of `steps` steps of `rows` answers: all, in the model, choosing; then nobody is left."""
        engine, draw = self._bench.engine, random.Random(rows)  # noqa: S311 - repeatable on purpose
        for number in range(rows):
            item = Item(random_ids(draw, PROMPT_TOKENS), engine.limits.context_length - PROMPT_TOKENS)
            self._bench.add(number, item, {**SAMPLINGS[sampling], "seed": number})
        settled = 0
        while settled < _SETTLING_STEPS:
            facts = engine.step().facts
            settled += facts is not None and (facts.sequence_count, facts.prefill_token_count) == (rows, 0)
        found = [self._step() for _ in range(steps)]
        engine.abort_all()
        while engine.has_work:
            engine.step()
        return found

    def _step(self) -> tuple[int, int, int]:
        self._model_ns = self._sampler_ns = 0
        begun = time.monotonic_ns()
        self._bench.engine.step()
        return time.monotonic_ns() - begun, self._model_ns, self._sampler_ns

    def _in_model(self, spent_ns: int) -> None:
        self._model_ns += spent_ns

    def _in_sampler(self, spent_ns: int) -> None:
        self._sampler_ns += spent_ns

    def _watch(self, owner: Any, name: str, spent: Callable[[int], None]) -> None:
        function = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            begun = time.monotonic_ns()
            try:
                return function(*arguments, **named)
            finally:
                spent(time.monotonic_ns() - begun)

        setattr(owner, name, watched)


def summary(rows: int, sampling: str, steps: list[tuple[int, int, int]]) -> dict[str, Any]:
    """A line of the report: milliseconds."""
    columns = {
        "step_ms": [step for step, _, _ in steps],
        "model_ms": [model for _, model, _ in steps],
        "sampler_ms": [sampler for _, _, sampler in steps],
        "host_ms": [step - model for step, model, _ in steps],
    }
    middle = {name: {"p50": quantile(ns, 0.5) / 1e6, "p95": quantile(ns, 0.95) / 1e6} for name, ns in columns.items()}
    return {"rows": rows, "sampling": sampling, "steps": len(steps), **middle}
