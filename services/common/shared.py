"""The Redis that several processes share: where it is, and connections that wait for each other. Knows no service."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import RedisError

from services.common.settings import setting

CONNECTIONS = 32


class SharedStateLost(Exception):
    """Redis did not answer in time; the message is the kind of failure."""


@dataclass(frozen=True)
class RedisSettings:
    """Where state lives that several processes share."""

    SECTION = "REDIS"
    url: str = setting("", "redis://[user:password@]host[:port][/database]; empty: in this process", secret=True)

    def __post_init__(self) -> None:
        try:
            database = urlsplit(self.url).path.strip("/") if self.url and parse_url(self.url) else ""
            if database and not (self.url.startswith("unix:") or database.isdecimal()):
                raise ValueError
        except ValueError:  # whose words may hold the password
            raise ValueError("HEADRACE_REDIS_URL: expected redis://[[user]:password@]host[:port][/database]") from None


def connect(url: str, timeout_s: float, *, retries: int = 1, connections: int = CONNECTIONS) -> redis.Redis:
    """A client whose pool waits for a free connection; nothing is sent yet.

    Args:
        url: redis://[[user]:password@]host[:port][/database], or rediss:// for TLS.
        timeout_s: seconds for each of: a free connection, connecting, an answer.
        retries: times that a failed command is sent again; commands must bear being sent twice.
        connections: most at a time.
    """
    pool = redis.BlockingConnectionPool.from_url(
        url,
        max_connections=connections,
        timeout=timeout_s,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(ExponentialBackoff(cap=0.05, base=0.01), retries),
    )
    return redis.Redis(connection_pool=pool)


async def reached(answer: Awaitable[Any] | Any) -> Any:
    """The answer of a command. Raises SharedStateLost."""
    try:
        return await cast("Awaitable[Any]", answer)
    except (RedisError, OSError, TimeoutError) as error:
        raise SharedStateLost(type(error).__name__) from error
