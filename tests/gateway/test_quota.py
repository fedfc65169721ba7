"""Quotas are exact, in memory and in a real Redis alike; time is moved, not waited for."""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import dataclass
from itertools import count

import pytest

from services.gateway.identity import Limits
from services.gateway.quota import Charge, MemoryQuotas, Usage, UsageFile
from services.gateway.redis_quota import RedisQuotas

DAY = 20_000 * 86_400.0


class InMemory:
    """Quotas in memory with a clock that is moved."""

    def __init__(self, tmp_path) -> None:
        self.path, self.time = tmp_path / "usage.jsonl", DAY
        self.quotas = MemoryQuotas(UsageFile(self.path), lambda: self.time)

    def pass_time(self, seconds: float) -> None:
        self.time += seconds

    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def spent(self, key: str) -> int:
        return self.quotas.spent_today(key)


class InRedis:
    """Quotas in Redis; time passes by moving what is stored there into the past."""

    def __init__(self, server) -> None:
        self.client, self.key = server.client, ""
        self.client.flushall()
        self.quotas = RedisQuotas(server.url, timeout_s=5)

    def pass_time(self, seconds: float) -> None:
        for base in self.client.keys("headrace:quota:*"):
            if self.client.type(base) == b"hash" and not base.endswith(b":data"):
                for kind in ("requests:at", "tokens:at"):
                    if self.client.hexists(base, kind):
                        self.client.hincrbyfloat(base, kind, -seconds)
            if self.client.type(base) == b"zset":
                for member, _ in self.client.zrange(base, 0, -1, withscores=True):
                    self.client.zincrby(base, -seconds, member)

    def records(self) -> list[dict]:
        return [json.loads(fields[b"usage"]) for _, fields in self.client.xrange("headrace:usage")]

    def spent(self, key: str) -> int:
        return sum(int(self.client.get(name)) for name in self.client.keys(f"headrace:quota:{key}:day:*"))


@pytest.fixture(params=["memory", "redis"])
async def store(request, tmp_path):
    made = InMemory(tmp_path) if request.param == "memory" else InRedis(request.getfixturevalue("redis_server"))
    yield made
    await made.quotas.close()


@pytest.fixture
async def in_redis(redis_server):
    made = InRedis(redis_server)
    yield made
    await made.quotas.close()


NUMBERS = count()


@dataclass
class Ask:
    """Charges of one key."""

    limits: Limits
    key: str = ""

    def __post_init__(self) -> None:
        self.key = uuid.uuid4().hex[:12]

    def charge(self, tokens: int = 1) -> Charge:
        return Charge(f"r{next(NUMBERS)}", self.key, self.limits, tokens)

    def usage(self, charge: Charge, prompt: int = 0, completion: int = 0, outcome: str = "stop") -> Usage:
        usage = Usage(charge.lease_id, "acme", self.key, "m", "Generate", outcome)
        usage.prompt_tokens, usage.completion_tokens = prompt, completion
        return usage


async def test_a_barrier_of_requests_is_cut_at_the_limit(store):
    """A hundred at once on a limit of ten: exactly ten, in each of 20 windows; the refused are told when to come."""
    ask = Ask(Limits(requests_per_minute=10))
    for _ in range(20):
        charges = [ask.charge() for _ in range(100)]
        refusals = await asyncio.gather(*(store.quotas.reserve(charge) for charge in charges))
        assert refusals.count(None) == 10
        refused = next(refusal for refusal in refusals if refusal)
        assert refused.limit == "requests_per_minute"
        assert 0 < refused.wait_s <= 6
        granted = [charge for charge, refusal in zip(charges, refusals, strict=True) if refusal is None]
        for charge in granted:
            await store.quotas.settle(charge, ask.usage(charge, 1))
        store.pass_time(60)


async def test_tokens_are_reserved_and_given_back(store):
    """What was reserved and not used can be used by others at once; what can never be granted has no time."""
    ask = Ask(Limits(tokens_per_minute=100))
    first, second, huge = ask.charge(80), ask.charge(80), ask.charge(101)
    assert await store.quotas.reserve(first) is None
    refusal = await store.quotas.reserve(second)
    assert refusal.limit == "tokens_per_minute"
    assert 30 < refusal.wait_s <= 36.1
    assert (await store.quotas.reserve(huge)).wait_s is None
    await store.quotas.settle(first, ask.usage(first, 5, 10))
    assert await store.quotas.reserve(second) is None


async def test_open_requests_are_bounded(store):
    """A place comes back when its request ends, and a reservation that is asked for twice is one."""
    ask = Ask(Limits(concurrent_requests=1))
    first, second = ask.charge(), ask.charge()
    assert await store.quotas.reserve(first) is None
    assert await store.quotas.reserve(first) is None
    assert (await store.quotas.reserve(second)).limit == "concurrent_requests"
    await store.quotas.settle(first, None)
    assert await store.quotas.reserve(second) is None


async def test_a_days_budget_is_exact_after_200_mixed_endings(store):
    """Done, cancelled, failed, never begun, settled twice: the sum is what was used, to the token; one record each."""
    ask = Ask(Limits(tokens_per_day=1_000_000, requests_per_minute=100_000))
    expected, written = 0, 0
    charges = [ask.charge(100 + number) for number in range(200)]
    assert await asyncio.gather(*(store.quotas.reserve(charge) for charge in charges)) == [None] * 200
    assert store.spent(ask.key) == sum(charge.token_count for charge in charges)
    endings = []
    for number, charge in enumerate(charges):
        if number % 5 == 4:
            endings.append((charge, None))
            continue
        outcome = ("stop", "length", "CANCELLED", "PEER_LOST")[number % 5]
        usage = ask.usage(charge, number, 0 if number % 5 == 3 else 7, outcome)
        expected, written = expected + usage.token_count, written + 1
        endings += [(charge, usage), (charge, usage)]
    await asyncio.gather(*(store.quotas.settle(charge, usage) for charge, usage in endings))
    assert store.spent(ask.key) == expected
    assert len(store.records()) == written == len({record["request_id"] for record in store.records()})
    huge = ask.charge(1_000_000 - expected + 1)
    refusal = await store.quotas.reserve(huge)
    assert refusal.limit == "tokens_per_day"
    assert refusal.wait_s > 0
    assert await store.quotas.reserve(ask.charge(1_000_000 - expected)) is None


async def test_the_lease_of_a_gateway_that_died_is_settled(in_redis):
    """Once, as far as it was told: the rest goes back, and the record says lost; a late settlement changes nothing."""
    ask = Ask(Limits(tokens_per_day=1000, concurrent_requests=1, tokens_per_minute=1000))
    charge = ask.charge(900)
    assert await in_redis.quotas.reserve(charge, ask.usage(charge, 10)) is None
    await in_redis.quotas.renew(charge, ask.usage(charge, 10, 25))
    assert (await in_redis.quotas.reserve(ask.charge(1))).limit == "concurrent_requests"
    in_redis.pass_time(31)
    await asyncio.gather(*(in_redis.quotas.sweep() for _ in range(5)))
    assert in_redis.spent(ask.key) == 35
    await in_redis.quotas.settle(charge, ask.usage(charge, 10, 800))
    assert in_redis.spent(ask.key) == 35
    assert [(r["outcome"], r["completion_tokens"]) for r in in_redis.records()] == [("lost", 25)]
    assert await in_redis.quotas.reserve(ask.charge(900)) is None


async def test_a_key_without_expiry_is_repaired(in_redis):
    """However it got there, the next decision gives it one, and it blocks nobody for ever."""
    ask = Ask(Limits(requests_per_minute=10, tokens_per_day=50))
    base = f"headrace:quota:{ask.key}"
    in_redis.client.hset(base, mapping={"requests:level": 0, "requests:at": 99999999999})
    assert await in_redis.quotas.reserve(ask.charge()) is None
    keys = list(in_redis.client.keys(f"{base}*"))
    assert keys
    assert all(in_redis.client.ttl(key) > 0 for key in keys)


async def test_a_clock_that_goes_back_refills_nothing(in_redis):
    """A bucket whose last refill lies ahead is neither refilled nor moved back."""
    ask = Ask(Limits(requests_per_minute=1))
    assert await in_redis.quotas.reserve(ask.charge()) is None
    in_redis.pass_time(-30)
    before = in_redis.client.hget(f"headrace:quota:{ask.key}", "requests:at")
    assert await in_redis.quotas.reserve(ask.charge()) is not None
    assert in_redis.client.hget(f"headrace:quota:{ask.key}", "requests:at") == before


async def test_scripts_that_redis_forgot_are_sent_again(in_redis):
    """After SCRIPT FLUSH, and after everything is gone: one charge a request."""
    ask = Ask(Limits(requests_per_minute=2))
    for forget in (in_redis.client.script_flush, in_redis.client.script_flush):
        forget()
        assert await in_redis.quotas.reserve(ask.charge()) is None
    assert await in_redis.quotas.reserve(ask.charge()) is not None
    in_redis.client.flushall()
    assert await in_redis.quotas.reserve(ask.charge()) is None


async def test_a_settlement_before_a_late_reservation_leaves_no_lease(in_redis):
    """A reservation that was given up, and arrives afterwards, holds nothing."""
    ask = Ask(Limits(concurrent_requests=1))
    charge = ask.charge()
    await in_redis.quotas.settle(charge, None)
    await in_redis.quotas.reserve(charge)
    assert await in_redis.quotas.reserve(ask.charge()) is None
    assert in_redis.records() == []
