"""Engines that say by themselves where they are: addresses in Redis, each with a lease. Knows no service."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from services.common.logs import Log
from services.common.shared import SharedStateLost, connect, reached

REGISTRY_KEY = "headrace:engines"  # a sorted set: address → unix time at which its lease ends
LEASE_S = 10.0
RENEW_S = 2.0
CALL_TIMEOUT_S = 1.0

_ANNOUNCE = """
local time = redis.call('TIME')
redis.call('ZADD', KEYS[1], time[1] + tonumber(ARGV[2]), ARGV[1])
redis.call('EXPIRE', KEYS[1], 86400)
return 1
"""
_LIST = """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', redis.call('TIME')[1])
return redis.call('ZRANGE', KEYS[1], 0, -1)
"""


class Registry:
    """Where engines are. Every call raises SharedStateLost where Redis does not answer.

    Args:
        url: of Redis.
        lease_s: whole seconds that an announcement holds.
    """

    def __init__(self, url: str, lease_s: float = LEASE_S) -> None:
        self._lease_s = max(1, round(lease_s))
        self._redis = connect(url, CALL_TIMEOUT_S, connections=2)
        self._announce, self._list = self._redis.register_script(_ANNOUNCE), self._redis.register_script(_LIST)

    async def announce(self, address: str) -> None:
        """An engine is at an address; holds for a lease."""
        await reached(self._announce(keys=[REGISTRY_KEY], args=[address, self._lease_s]))

    async def withdraw(self, address: str) -> None:
        """It is there no longer."""
        await reached(self._redis.zrem(REGISTRY_KEY, address))

    async def addresses(self) -> list[str]:
        """Every engine whose lease holds."""
        return sorted(address.decode() for address in await reached(self._list(keys=[REGISTRY_KEY])))

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose(close_connection_pool=True)


async def repeat(work: Callable[[], Awaitable[None]], what: str, log: Log, every_s: float = RENEW_S) -> None:
    """Does something again and again, for ever; the first of a row of failures is a line in the log."""
    failing = False
    while True:
        try:
            await work()
        except SharedStateLost as error:
            if not failing:
                log.warning("registry does not answer", doing=what, reason=str(error))
            failing = True
        else:
            failing = False
        await asyncio.sleep(every_s)
