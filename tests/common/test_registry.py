"""Engines are where they say, for as long as they say it."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from services.common.registry import REGISTRY_KEY, Registry, repeat
from services.common.shared import SharedStateLost


async def test_a_lease_ends(redis_server):
    """Announced twice is there once; a lease that has run out, or was withdrawn, is gone."""
    redis_server.client.delete(REGISTRY_KEY)
    registry = Registry(redis_server.url)
    for address in ("b:1", "a:1", "b:1"):
        await registry.announce(address)
    assert await registry.addresses() == ["a:1", "b:1"]
    assert redis_server.client.ttl(REGISTRY_KEY) > 0
    redis_server.client.zincrby(REGISTRY_KEY, -60, "a:1")
    assert await registry.addresses() == ["b:1"]
    await registry.withdraw("b:1")
    assert await registry.addresses() == []
    await registry.close()


async def test_without_redis_it_is_tried_again(own_redis_server):
    """And what was announced is there when it is back."""
    registry = Registry(own_redis_server.url)
    own_redis_server.stop()
    with pytest.raises(SharedStateLost):
        await registry.addresses()
    log = structlog.stdlib.get_logger()
    announced = asyncio.Event()

    async def announce() -> None:
        await registry.announce("a:1")
        announced.set()

    announcing = asyncio.create_task(repeat(announce, "announce", log, 0.01))
    await asyncio.to_thread(own_redis_server.start)
    await asyncio.wait_for(announced.wait(), 10)
    assert own_redis_server.client.zrange(REGISTRY_KEY, 0, -1) == [b"a:1"]
    announcing.cancel()
    await asyncio.gather(announcing, return_exceptions=True)
    await registry.close()
