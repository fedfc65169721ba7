"""Runs a workload through a gateway, as clients do: token ids in, streams out. Knows the client alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from headrace import channels, errors
from headrace.answers import FinishReason
from headrace.bench.results import Run, RunFailed
from headrace.bench.workloads import Item, Workload
from headrace.client import AsyncClient

Tick = Callable[[int], None]  # output tokens so far
TextOf = Callable[[Sequence[int]], str]


class _Measured:
    """What the clients of one pass add up."""

    def __init__(self, tick: Tick, text_of: TextOf | None) -> None:
        self.tick, self._text_of = tick, text_of
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0
        self.first_token_s: list[float] = []
        self.between_tokens_s: list[float] = []

    async def ask(self, client: AsyncClient, item: Item) -> None:
        """Streams one item and counts."""
        sent = time.monotonic()
        first = last = 0.0
        tokens = 0
        options: dict[str, Any] = {"max_tokens": item.output, "temperature": 0.0, "ignore_eos": True}
        if self._text_of is None:
            stream = client.stream(token_ids=item.prompt, **options)
        else:
            stream = client.stream(self._text_of(item.prompt), **options)
        async for delta in stream:
            last = time.monotonic()
            if delta.token_count and not first:
                first = last
            tokens += delta.token_count
            self.output_tokens += delta.token_count
            self.tick(self.output_tokens)
        answer = stream.answer
        if answer.finish_reason is not FinishReason.LENGTH or tokens != item.output:
            raise RunFailed(f"a request ended {answer.finish_reason} after {tokens} of {item.output} tokens")
        self.prompt_tokens += answer.usage.prompt_token_count
        self.cached_tokens += answer.usage.cached_token_count
        self.first_token_s.append(first - sent)
        if tokens > 1:
            self.between_tokens_s.append((last - first) / (tokens - 1))


async def run(
    target: str,
    workload: Workload,
    concurrency: int,
    tick: Tick = lambda _tokens: None,
    text_of: TextOf | None = None,
) -> Run:
    """One pass with `concurrency` clients, each with a connection of its own; a chain stays with one client.

    With `text_of` the prompts go as the text that it makes of their ids.

    Raises:
        RunFailed: a call failed, or did not generate what it had to.
    """
    measured = _Measured(tick, text_of)
    chains = iter(workload)
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(target, options=channels.OWN_CONNECTION))
            for _ in range(min(concurrency, len(workload)))
        ]
        await _connect(clients)
        begun = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for client in clients:
                    group.create_task(_work(client, chains, measured))
        except BaseExceptionGroup as failed:
            raise _first(failed) from failed
        seconds = time.monotonic() - begun
    return Run(
        seconds,
        measured.prompt_tokens,
        measured.cached_tokens,
        measured.output_tokens,
        measured.first_token_s,
        measured.between_tokens_s,
    )


async def _work(client: AsyncClient, chains: Iterator[list[Item]], measured: _Measured) -> None:
    for chain in chains:  # shared: each client takes the next one
        for item in chain:
            await measured.ask(client, item)


async def _connect(clients: list[AsyncClient]) -> None:
    """Connects every client, so that connecting is not measured."""
    try:
        await asyncio.gather(*(client.list_models() for client in clients))
    except errors.HeadraceError as error:
        raise _readable(error) from error


def _first(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    error = failed.exceptions[0]
    return _readable(error) if isinstance(error, errors.HeadraceError) else error


def _readable(error: errors.HeadraceError) -> RunFailed:
    return RunFailed(f"{type(error).__name__}: {error.message}")
