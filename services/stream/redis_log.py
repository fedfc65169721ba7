"""The replay log in Redis: what several stream processes, or one after its restart, share.

A stream is a hash (tenant, opening, epoch, bytes) and a list of entries; both expire together, refreshed by every
append. Each decision is one Lua script, so no crash leaves a key without its expiry or an entry without its number.
"""

from __future__ import annotations

from services.common.shared import connect, reached
from services.stream.replay import MAX_STREAM_BYTES, LogFull, Record, Superseded

CALL_TIMEOUT_S = 0.25

# KEYS: hash, list. ARGV: ttl in seconds, then what each needs. Answers are small integers or the data itself.
_CREATE = """
redis.call('HSET', KEYS[1], 'tenant', ARGV[2], 'opening', ARGV[3], 'epoch', 1, 'bytes', 0)
redis.call('DEL', KEYS[2])
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
"""
_APPEND = """
if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[2] then return -1 end
local length = redis.call('LLEN', KEYS[2])
local number = tonumber(ARGV[3])
if length == number + 1 and redis.call('LINDEX', KEYS[2], -1) == ARGV[4] then return 1 end
if length ~= number then return -1 end
if redis.call('HINCRBY', KEYS[1], 'bytes', #ARGV[4]) > tonumber(ARGV[5]) then return -2 end
redis.call('RPUSH', KEYS[2], ARGV[4])
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[1])
return 1
"""
_TAKE_OVER = """
if redis.call('HGET', KEYS[1], 'tenant') ~= ARGV[2] then return {} end
local epoch = redis.call('HINCRBY', KEYS[1], 'epoch', 1)
redis.call('EXPIRE', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[2], ARGV[1])
return {epoch, redis.call('HGET', KEYS[1], 'opening'), redis.call('LRANGE', KEYS[2], 0, -1)}
"""


class RedisLog:
    """A `ReplayLog` in Redis.

    Args:
        url: redis://[[user]:password@]host[:port][/database], or rediss:// for TLS.
        ttl_s: seconds that a stream is kept after its last entry.
    """

    def __init__(self, url: str, ttl_s: float) -> None:
        self._ttl_s = max(1, round(ttl_s))
        self._redis = connect(url, CALL_TIMEOUT_S)
        self._create = self._redis.register_script(_CREATE)
        self._append = self._redis.register_script(_APPEND)
        self._take_over = self._redis.register_script(_TAKE_OVER)

    async def create(self, stream_id: str, tenant: str, opening: bytes) -> int:
        """Starts a stream; returns its epoch."""
        return int(await reached(self._create(keys=_keys(stream_id), args=[self._ttl_s, tenant, opening])))

    async def append(self, stream_id: str, epoch: int, sequence_number: int, entry: bytes) -> None:
        """Adds the entry of that number; adding the last one again is the same as once, so that it can be retried."""
        arguments: list[str | bytes | int | float] = [self._ttl_s, epoch, sequence_number, entry, MAX_STREAM_BYTES]
        answer = await reached(self._append(keys=_keys(stream_id), args=arguments))
        if answer == -1:
            raise Superseded(stream_id)
        if answer == -2:
            raise LogFull(stream_id)

    async def owns(self, stream_id: str, epoch: int) -> bool:
        """Whether nobody has taken the stream over since."""
        present = await reached(self._redis.hget(_keys(stream_id)[0], "epoch"))
        return present is not None and int(present) == epoch

    async def take_over(self, stream_id: str, tenant: str) -> Record | None:
        """Makes the caller the owner."""
        answer = await reached(self._take_over(keys=_keys(stream_id), args=[self._ttl_s, tenant]))
        if not answer:
            return None
        epoch, opening, entries = answer
        return Record(tenant, opening, int(epoch), list(entries))

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose(close_connection_pool=True)


def _keys(stream_id: str) -> list[str]:
    return [f"headrace:replay:{{{stream_id}}}", f"headrace:replay:{{{stream_id}}}:log"]
