"""Which engine a request goes to. Knows no connection: engines report, requests come and go.

The engine is chosen that has least to do before the first token: tokens of the prompt that it has not computed yet, and
its open requests, each counted as some tokens. An engine that fails is left alone for a while, longer each time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.errors import NotFound, Unavailable
from headrace.v1 import engine_pb2
from services.gateway.affinity import PrefixIndex

OPEN_REQUEST_TOKENS = 32  # what one more open request weighs, in tokens of a prompt to compute
FIRST_REST_S = 0.5
LONGEST_REST_S = 8.0


@dataclass(slots=True)
class Engine:
    """One engine as the router knows it.

    Attributes:
        address: host:port.
        serving: it says so.
        draining: it gets no new request.
        facts: None until it has answered GetEngine.
        open_count: requests that this gateway has on it.
        sent_count: requests that it was ever given.
        failure_count: in a row.
        rests_until: monotonic seconds; it gets nothing before.
    """

    address: str
    serving: bool = False
    draining: bool = False
    facts: engine_pb2.GetEngineResponse | None = None
    open_count: int = 0
    sent_count: int = 0
    failure_count: int = 0
    rests_until: float = 0.0

    def serves(self, model: str) -> bool:
        """Whether it may get a request for a model."""
        return self.serving and not self.draining and self.facts is not None and self.facts.model == model


@dataclass(frozen=True, slots=True)
class Chosen:
    """An engine, and what it probably has of the prompt: in tokens, and as `PrefixIndex.correct` wants it."""

    engine: Engine
    predicted_cached: int
    expected: Sequence[int] = ()

    @property
    def address(self) -> str:
        """host:port."""
        return self.engine.address


class Router:
    """Chooses engines.

    Args:
        addresses: engines that are known from the start.
        now: monotonic seconds.
        draw: a number in [0, 1), for jitter.
    """

    def __init__(
        self,
        addresses: tuple[str, ...],
        now: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self.engines = {address: Engine(address) for address in addresses}
        self.index = PrefixIndex()
        self._now, self._draw = now, draw

    def sequence_count(self, knee: int = 0) -> int:
        """Sequences that the serving engines can run together, none of them more than `knee` (0: no such bound)."""
        engines = [engine.facts for engine in self.engines.values() if engine.serving and engine.facts]
        return sum(min(facts.max_num_seqs, knee or facts.max_num_seqs) for facts in engines)

    def models(self) -> dict[str, engine_pb2.GetEngineResponse]:
        """Facts of each model that is or was served, by name."""
        return {engine.facts.model: engine.facts for engine in self.engines.values() if engine.facts}

    def facts(self, model: str) -> engine_pb2.GetEngineResponse:
        """Facts of a model; "": the only one.

        Raises:
            NotFound: no engine serves it.
            Unavailable: no engine has answered yet.
        """
        models = self.models()
        if not models:
            raise Unavailable("no engine has answered yet", retry_after_s=1.0)
        if not model and len(models) == 1:
            return next(iter(models.values()))
        if model not in models:
            served = ", ".join(sorted(models))
            asked = f"model {model!r} is not served" if model else "several models are served, and none is named"
            raise NotFound(f"generation.model: {asked}; expected one of: {served}", field="generation.model")
        return models[model]

    def others(self, address: str, model: str) -> list[str]:
        """Addresses of the model's other engines, the least loaded first."""
        rest = [e for e in self.engines.values() if e.address != address and e.facts and e.facts.model == model]
        return [e.address for e in sorted(rest, key=lambda e: (not e.serving, e.draining, e.open_count))]

    def can_serve(self, model: str, tried: Collection[str] = ()) -> bool:
        """Whether an engine other than those tried would take a request now."""
        return any(engine.serves(model) and engine.address not in tried for engine in self.engines.values())

    @contextmanager
    def choose(
        self, model: str, names: Sequence[int] = (), prompt_length: int = 0, tried: Collection[str] = ()
    ) -> Iterator[Chosen]:
        """Holds a place on the engine with the least to do.

        Args:
            model: by name.
            names: of the prompt's blocks, by `PrefixIndex.names`.
            prompt_length: tokens.
            tried: addresses that have failed this request.

        Raises:
            Unavailable: no other engine of the model serves now.
        """
        serving = [e for e in self.engines.values() if e.serves(model) and e.address not in tried]
        if not serving:
            raise Unavailable(f"no {'other ' if tried else ''}engine serves {model} now", retry_after_s=1.0)
        now = self._now()
        rested = [e for e in serving if e.rests_until <= now] or serving
        cached = {e.address: min(prompt_length, self.index.predict(e.address, names)) for e in rested}
        engine = min(
            rested,
            key=lambda e: (prompt_length - cached[e.address] + OPEN_REQUEST_TOKENS * e.open_count, e.sent_count),
        )
        expected = self.index.learn(engine.address, names, engine.facts.memory.kv_block_count if engine.facts else 0)
        engine.open_count += 1
        engine.sent_count += 1
        try:
            yield Chosen(engine, cached[engine.address], expected)
        finally:
            engine.open_count -= 1

    def succeeded(self, chosen: Chosen, cached_tokens: int | None) -> None:
        """An engine has answered, and had so many tokens of the prompt; None: it was not to use what it had."""
        chosen.engine.failure_count = 0
        chosen.engine.rests_until = 0.0
        if cached_tokens is not None:
            self.index.correct(chosen.address, chosen.expected, cached_tokens)

    def failed(self, engine: Engine) -> None:
        """It was lost under a request: it rests, longer each time, and what it had computed may be gone."""
        rest_s = min(LONGEST_REST_S, FIRST_REST_S * 2**engine.failure_count)
        engine.failure_count += 1
        engine.rests_until = self._now() + rest_s * (0.5 + self._draw() / 2)
        self.index.forget(engine.address)
