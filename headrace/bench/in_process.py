"""Runs a workload through the engine alone, in this process: no gRPC, no text. Needs the services and torch.

Imports the services when it is used; the published package does not have them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from headrace.bench.results import Run, RunFailed
from headrace.bench.workloads import Item, Workload

if TYPE_CHECKING:
    from services.engine.engine import Engine

GREEDY: Mapping[str, Any] = MappingProxyType({"temperature": 0.0})
Tick = Callable[[int], None]  # output tokens so far


@dataclass
class _Open:
    """A request under way."""

    chain: int
    place: int  # in its chain
    item: Item
    sent_s: float
    first_s: float = 0.0
    token_count: int = 0


class EngineBench:
    """An engine made from the same settings as the engine process, warm.

    Args:
        variables: environment variables, flags included.

    Raises:
        ImportError: the services or torch are not here.
        ValueError: a setting or the model is wrong; the message says which.
    """

    def __init__(self, variables: Mapping[str, str]) -> None:
        from services.common import settings
        from services.engine.engine import Engine, EngineConfig
        from services.engine.settings import EngineProcessSettings

        loaded = settings.load(EngineProcessSettings, variables, "engine")
        from headrace.models import resolve

        directory = resolve(loaded.model.model)
        self.engine: Engine = Engine.load(EngineConfig(model_dir=directory, **asdict(loaded.engine)))
        self.engine.warm_up()

    def run(
        self,
        workload: Workload,
        tick: Tick = lambda _tokens: None,
        prefix_cache: str = "kept",
        *,
        empty: bool = True,
    ) -> Run:
        """One pass; every chain's first item is there from the start.

        Args:
            workload: what to generate.
            tick: called after each step.
            prefix_cache: "kept"; "reset" before each item; or "off".
            empty: nothing of earlier passes is in the prefix cache.

        Raises:
            RunFailed: a request ended otherwise than at its length.
        """
        self.engine.use_prefix_cache(enabled=prefix_cache != "off")
        if empty:
            self.engine.flush_prefix_cache()
        open_: dict[int, _Open] = {}
        done: list[_Open] = []
        cached = ended_s = 0.0
        between: list[float] = []
        begun, cpu_begun = time.monotonic(), time.process_time()
        for chain in range(len(workload)):
            self._add(open_, workload, chain, 0)
        while open_:
            news = self.engine.step().outputs
            now = time.monotonic()
            for output in news:
                request = open_[output.request_id]
                if output.token_ids and not request.token_count:
                    request.first_s = now
                request.token_count += len(output.token_ids)
                if output.finish is None:
                    continue
                _check(output, request)
                del open_[output.request_id]
                done.append(request)
                cached += output.usage.cached_token_count if output.usage else 0
                if request.token_count > 1:
                    between.append((now - request.first_s) / (request.token_count - 1))
                if request.place + 1 < len(workload[request.chain]):
                    if prefix_cache == "reset":
                        self.engine.flush_prefix_cache()
                    self._add(open_, workload, request.chain, request.place + 1)
                ended_s = now
            tick(sum(request.token_count for request in (*done, *open_.values())))
        return Run(
            seconds=ended_s - begun,
            prompt_tokens=sum(len(request.item.prompt) for request in done),
            cached_tokens=int(cached),
            output_tokens=sum(request.token_count for request in done),
            first_token_s=[request.first_s - request.sent_s for request in done],
            between_tokens_s=between,
            cpu_seconds=time.process_time() - cpu_begun,
        )

    def add(self, number: int, item: Item, sampling: Mapping[str, Any] = GREEDY) -> None:
        """Adds one request, to its full length."""
        from services.engine.request import Request, SamplingParams

        chosen = SamplingParams(**sampling)
        self.engine.add(Request(number, item.prompt, max_tokens=item.output, sampling=chosen, ignore_eos=True))

    def _add(self, open_: dict[int, _Open], workload: Workload, chain: int, place: int) -> None:
        item = workload[chain][place]
        number = chain * 1000 + place
        open_[number] = _Open(chain, place, item, time.monotonic())
        self.add(number, item)


def _check(output: Any, request: _Open) -> None:
    if output.finish.value != "length" or request.token_count != request.item.output:
        raise RunFailed(
            f"a request ended {output.finish.value} after {request.token_count} of {request.item.output} tokens"
            + (f": {output.error}" if output.error else "")
        )
