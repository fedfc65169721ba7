"""Which engine a request goes to. Knows no connection: engines report, requests come and go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.errors import NotFound, Unavailable
from headrace.v1 import engine_pb2


@dataclass(slots=True)
class Engine:
    """One engine as the router knows it. `facts` is None until it has answered GetEngine."""

    address: str
    serving: bool = False
    facts: engine_pb2.GetEngineResponse | None = None
    open_count: int = 0


class Router:
    """Chooses the least loaded serving engine of a model."""

    def __init__(self, addresses: tuple[str, ...]) -> None:
        self.engines = {address: Engine(address) for address in addresses}

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
        return [engine.address for engine in sorted(rest, key=lambda e: (not e.serving, e.open_count))]

    @contextmanager
    def choose(self, model: str) -> Iterator[Engine]:
        """Holds a place on the serving engine of `model` with the fewest open requests.

        Raises:
            Unavailable: no engine of the model serves now.
        """
        serving = [e for e in self.engines.values() if e.serving and e.facts and e.facts.model == model]
        if not serving:
            raise Unavailable(f"no engine serves {model} now", retry_after_s=1.0)
        engine = min(serving, key=lambda e: e.open_count)
        engine.open_count += 1
        try:
            yield engine
        finally:
            engine.open_count -= 1
