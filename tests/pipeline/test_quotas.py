"""Limits hold over two gateways and a real Redis, and every ending is charged to the token."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace import errors
from tests.pipeline.conftest import until
from tests.pipeline.gateways import start_gateway
from tests.redis_server import RedisServer

WINDOWS = int(os.environ.get("WINDOWS", "3"))


def add_key(server: RedisServer, key: str, **fields) -> dict[str, dict[str, str]]:
    """Puts a key into Redis; the arguments of a client that uses it."""
    server.client.hset("headrace:keys", hashlib.sha256(key.encode()).hexdigest(), json.dumps(fields))
    return {"headers": {"authorization": f"Bearer {key}"}}


def records(server: RedisServer, tenant: str) -> list[dict]:
    lines = [json.loads(fields[b"usage"]) for _, fields in server.client.xrange("headrace:usage")]
    return [line for line in lines if line["tenant"] == tenant]


@pytest.fixture(scope="module")
def shared():
    server = RedisServer()
    add_key(server, "few", tenant="few", requests_per_minute=10)
    add_key(server, "mixed", tenant="mixed", tokens_per_day=1_000_000)
    add_key(server, "lost", tenant="lost", tokens_per_day=1_000_000)
    yield server
    server.close()


SETTINGS = {"GATEWAY_KEYS_IN_REDIS": "true", "GATEWAY_LEASE_S": "2", "GATEWAY_DECISION_MS": "2000"}


@pytest.fixture(scope="module")
def gateways(tiny_pipeline, shared):
    settings = {**SETTINGS, "REDIS_URL": shared.url}
    with start_gateway(tiny_pipeline, **settings) as one, start_gateway(tiny_pipeline, **settings) as other:
        yield one, other


def headers(key: str) -> dict[str, dict[str, str]]:
    return {"headers": {"authorization": f"Bearer {key}"}}


def test_a_barrier_of_requests_over_two_gateways(gateways, shared):
    """A hundred at one moment on a limit of ten: exactly ten get in; the others are told when to come again."""
    barrier = threading.Barrier(100)
    key_id = hashlib.sha256(b"few").hexdigest()[:12]
    clients = [gateway.client(**headers("few")) for gateway in gateways]

    def ask(number: int) -> str:
        barrier.wait(60)
        try:
            clients[number % 2].generate("x", max_tokens=1, ignore_eos=True)
        except errors.ResourceExhausted as error:
            return error.quota if error.retry_after_s else "no hint"
        return "in"

    with ThreadPoolExecutor(100) as threads, contextlib.ExitStack() as stack:
        for client in clients:
            stack.enter_context(client)
        for _ in range(WINDOWS):
            shared.client.delete(f"headrace:quota:{key_id}")  # a minute later: the bucket is full again
            outcomes = list(threads.map(ask, range(100)))
            assert outcomes.count("in") == 10
            assert outcomes.count("requests_per_minute=10") == 90


def test_mixed_endings_are_charged_to_the_token(gateways, shared):
    """200 that end, are cancelled, run out of time or are refused: budget, records and what callers saw agree."""

    def ask(number: int) -> int:
        with gateways[number % 2].client(**headers("mixed")) as client:
            kind = number % 4
            if kind == 0:
                usage = client.generate("Once upon", max_tokens=5, ignore_eos=True).usage
                return usage.prompt_token_count + usage.completion_token_count
            if kind == 1:
                with contextlib.suppress(errors.HeadraceError):
                    client.generate("Once upon", max_tokens=1500, ignore_eos=True, timeout=0.02)
                return 0
            if kind == 2:
                with contextlib.closing(iter(client.stream("Once", max_tokens=1500, ignore_eos=True))) as deltas:
                    next(deltas)
                return 0
            with contextlib.suppress(errors.InvalidArgument):
                client.generate("Once", max_tokens=0)
            return 0

    with ThreadPoolExecutor(8) as threads:
        seen = list(threads.map(ask, range(200)))
    key_id = hashlib.sha256(b"mixed").hexdigest()[:12]
    base = f"headrace:quota:{key_id}"
    until(lambda: not shared.client.zcard(f"{base}:leases"), 20, "every lease has ended")
    lines = records(shared, "mixed")
    assert len({line["request_id"] for line in lines}) == len(lines) <= 150
    done = [line for line in lines if line["outcome"] == "length"]
    assert sum(line["prompt_tokens"] + line["completion_tokens"] for line in done) == sum(seen)
    assert len(done) == 50
    assert {line["outcome"] for line in lines} <= {"length", "CANCELLED", "DEADLINE_EXCEEDED"}
    spent = sum(int(shared.client.get(key)) for key in shared.client.keys(f"{base}:day:*"))
    assert spent == sum(line["prompt_tokens"] + line["completion_tokens"] for line in lines)


def test_a_gateway_that_is_killed_leaves_its_account(tiny_pipeline, gateways, shared):
    """Another settles what it had open, once, as lost."""
    with start_gateway(tiny_pipeline, **SETTINGS, REDIS_URL=shared.url) as doomed:
        client = doomed.client(**headers("lost"))
        deltas = iter(client.stream("Once", max_tokens=1500, ignore_eos=True, window=4))
        next(deltas)
        doomed.supervisor.stop(at_once=True)
        with pytest.raises(errors.Unavailable):
            list(deltas)
        client.close()
    until(lambda: bool(records(shared, "lost")), 20, "the lease is settled")
    (line,) = records(shared, "lost")
    assert line["outcome"] in ("lost", "CANCELLED", "SHUTTING_DOWN")
    key_id = hashlib.sha256(b"lost").hexdigest()[:12]
    spent = sum(int(shared.client.get(key)) for key in shared.client.keys(f"headrace:quota:{key_id}:day:*"))
    assert spent == line["prompt_tokens"] + line["completion_tokens"]
