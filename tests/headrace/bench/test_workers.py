"""Guarantees of the client processes, over real connections to a scripted gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.bench import attribution, records
from headrace.bench.load import workers
from headrace.bench.load.spec import Leg, LoadSpec
from headrace.bench.load.workers import Where
from headrace.bench.records import OK
from headrace.bench.results import RunFailed
from tests.headrace.scripted_gateway import TRACE_ID, ScriptedGateway, serving

SPEC = LoadSpec(
    "closed", (Leg(4, requests=30),), prompt="36", output="3", tenants={"acme": 1.0}, priorities={"batch": 1}
)


async def test_every_request_is_made_once_and_joined_with_its_receipt(tmp_path: Path) -> None:
    """Two processes: 30 requests between them, with credentials and priority; records survive their file."""
    gateway = ScriptedGateway()
    seen: list[tuple[int, int]] = []
    async with serving(gateway) as target:
        where = Where(target, {"acme": "secret"}, timeout_s=10.0)
        made, uses = await asyncio.to_thread(workers.run, SPEC, where, 2, lambda *counts: seen.append(counts))
    asked = [request.generation for request in gateway.requests if hasattr(request, "generation")]
    assert sorted(record.conversation for record in made) == list(range(30))
    assert sorted(tuple(one.token_ids.ids) for one in asked) == sorted(
        SPEC.conversation(number).turns[0].token_ids for number in range(30)
    )
    assert {record.client for record in made} == {0, 1}
    assert {record.outcome for record in made} == {OK}
    assert {record.trace_id for record in made} == {TRACE_ID}
    assert all((record.prompt_tokens, record.cached_tokens, record.output_tokens) == (36, 16, 3) for record in made)
    assert all(headers["authorization"] == "Bearer secret" for headers in gateway.headers)
    assert all(use.wall_s > 0 < use.cpu_s for use in uses)
    first = made[0]
    assert sum(attribution.stages_s(first).values()) == pytest.approx(first.ttft_s)
    records.write(tmp_path / "records.jsonl", made)
    assert records.read(tmp_path / "records.jsonl") == made


async def test_a_server_that_is_not_there_fails_the_run() -> None:
    """With its own word for it."""
    async with serving(ScriptedGateway()) as target:
        pass
    with pytest.raises(RunFailed, match="Unavailable"):
        await asyncio.to_thread(workers.run, SPEC, Where(target, {}, 1.0), 1, lambda *_: None)
