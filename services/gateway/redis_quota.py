"""Quotas that several gateways share, in Redis: each decision is one script, by the clock of Redis.

Of each key there are: a hash with its two buckets, a number of tokens for each day, the leases by their end, and what
each lease holds. Every script gives what it touches an expiry, so none is left behind without one. A lease whose
gateway died is settled by whoever comes by next, as far as it was told. `headrace:usage` is a stream that nothing here
shortens: it belongs to whoever makes bills of it. Needs one Redis, not a cluster of them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from services.common.shared_connection import Script, SharedConnection, Word
from services.gateway.quota import LIMIT_NAMES, Charge, Refusal, Usage, as_json

USAGE_KEY = "headrace:usage"
ACTIVE_KEY = "headrace:quota:active"  # keys that may have leases
CALL_TIMEOUT_S = 1.0  # of what runs in the background; who waits for a decision waits less, see `meter`

Answer = int | list[int]  # of a reservation: 0, granted; else the number of the limit, and ms to wait, -1: for ever

# KEYS: the key's name, the usage stream, the set of active keys. A lease holds limits, reserved tokens, day and usage.
_COMMON = """
local base, usage_key, active = KEYS[1], KEYS[2], KEYS[3]
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6

local function level_of(kind, capacity)
  local level = tonumber(redis.call('HGET', base, kind .. ':level') or '')
  local at = tonumber(redis.call('HGET', base, kind .. ':at') or '')
  if not level or not at or at > now + 120 then return capacity end
  return math.min(capacity, level + math.max(0, now - at) * capacity / 60)
end

local function put(kind, level)
  local at = tonumber(redis.call('HGET', base, kind .. ':at') or '') or 0
  if at > now + 120 then at = 0 end
  redis.call('HSET', base, kind .. ':level', string.format('%.6f', level), kind .. ':at',
    string.format('%.6f', math.max(at, now)))
  redis.call('EXPIRE', base, 120)
end

local function spend(day, tokens)
  redis.call('INCRBY', base .. ':day:' .. day, string.format('%d', tokens))
  redis.call('EXPIRE', base .. ':day:' .. day, 172800)
end

local function keep()
  redis.call('EXPIRE', base .. ':leases', 86400)
  redis.call('EXPIRE', base .. ':data', 86400)
end

-- Ends a lease: `back` tokens return to the key (negative: more was used than reserved), and the request if unused.
local function close(rpm, tpm, tpd, day, back, unused)
  if tpm > 0 then put('tokens', math.min(tpm, level_of('tokens', tpm) + back)) end
  if tpd > 0 then spend(day, -back) end
  if unused and rpm > 0 then put('requests', math.min(rpm, level_of('requests', rpm) + 1)) end
end

local function write_down(id, line)
  if redis.call('SET', 'headrace:settled:' .. id, '1', 'NX', 'EX', 86400) then
    redis.call('XADD', usage_key, '*', 'usage', line)
  end
end

local function sweep()
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', base .. ':leases', '-inf', now, 'LIMIT', 0, 100)) do
    local raw = redis.call('HGET', base .. ':data', id)
    redis.call('ZREM', base .. ':leases', id)
    redis.call('HDEL', base .. ':data', id)
    if raw then
      local lease = cjson.decode(raw)
      local used = lease.usage.prompt_tokens + lease.usage.completion_tokens
      close(lease.rpm, lease.tpm, lease.tpd, lease.day, lease.tokens - used, false)
      lease.usage.ended_at = now
      write_down(id, cjson.encode(lease.usage))
    end
  end
  if redis.call('ZCARD', base .. ':leases') == 0 then redis.call('SREM', active, base) end
end
"""
_RESERVE = Script(
    _COMMON
    + """
local id, lease_s, tokens, usage = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local rpm, tpm, most, tpd = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
sweep()
if redis.call('ZSCORE', base .. ':leases', id) then return 0 end
if redis.call('EXISTS', 'headrace:settled:' .. id) == 1 then return 0 end -- a late call: it has ended
local day = string.format('%d', math.floor(now / 86400))
local requests, left = level_of('requests', rpm), level_of('tokens', tpm)
if rpm > 0 and requests < 1 - 1e-6 then return {1, math.ceil((1 - requests) * 60000 / rpm)} end
if tpm > 0 and tokens > tpm then return {2, -1} end
if tpm > 0 and left < tokens - 1e-6 then return {2, math.ceil((tokens - left) * 60000 / tpm)} end
if most > 0 and redis.call('ZCARD', base .. ':leases') >= most then return {3, 1000} end
if tpd > 0 and tokens > tpd then return {4, -1} end
if tpd > 0 and (tonumber(redis.call('GET', base .. ':day:' .. day) or '') or 0) + tokens > tpd then
  return {4, math.ceil((86400 - now % 86400) * 1000)}
end
if rpm > 0 then put('requests', requests - 1) end
if tpm > 0 then put('tokens', left - tokens) end
if tpd > 0 then spend(day, tokens) end
local lease = {rpm = rpm, tpm = tpm, tpd = tpd, day = day, tokens = tokens, usage = cjson.decode(usage)}
redis.call('ZADD', base .. ':leases', now + lease_s, id)
redis.call('HSET', base .. ':data', id, cjson.encode(lease))
redis.call('SADD', active, base)
keep()
return 0
"""
)
_RENEW = Script(
    _COMMON
    + """
local id, raw = ARGV[1], redis.call('HGET', base .. ':data', ARGV[1])
if not raw then return 0 end
local lease = cjson.decode(raw)
lease.usage = cjson.decode(ARGV[3])
redis.call('HSET', base .. ':data', id, cjson.encode(lease))
redis.call('ZADD', base .. ':leases', 'XX', now + tonumber(ARGV[2]), id)
keep()
return 1
"""
)
_SETTLE = Script(
    _COMMON
    + """
local id, reserved, used, usage = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local raw = redis.call('HGET', base .. ':data', id)
if redis.call('EXISTS', 'headrace:settled:' .. id) == 1 and not raw then return 0 end
local day = raw and cjson.decode(raw).day or string.format('%d', math.floor(now / 86400))
redis.call('ZREM', base .. ':leases', id)
redis.call('HDEL', base .. ':data', id)
if raw or usage ~= '' then
  local back = raw and reserved - used or -used
  close(tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[8]), day, back, raw and used == 0)
end
if usage ~= '' then write_down(id, usage) end
redis.call('SET', 'headrace:settled:' .. id, '1', 'EX', 86400)
return 1
"""
)
_SWEEP = Script(_COMMON + "sweep()\nreturn 1\n")


class RedisQuotas:
    """Quotas in Redis.

    Args:
        url: of Redis.
        lease_s: seconds after which a lease that is not renewed is given up.
        timeout_s: of each call.
    """

    def __init__(self, url: str, lease_s: float = 30.0, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._lease_s = lease_s
        self._redis = SharedConnection(url, timeout_s)

    def ask(self, charge: Charge, usage: Usage) -> asyncio.Future[Answer]:
        """Asks for a lease; what comes back is for `refusal_of`."""
        held = (charge.lease_id, self._lease_s, charge.token_count, _lost(usage))
        return self._run(_RESERVE, charge.key_id, *held, *charge.limits.values())

    async def reserve(self, charge: Charge, usage: Usage | None = None) -> Refusal | None:
        """Takes a lease."""
        return refusal_of(charge, await self.ask(charge, usage or Usage(charge.lease_id, "", charge.key_id, "")))

    async def renew(self, charge: Charge, usage: Usage) -> None:
        """Keeps a lease."""
        await self._run(_RENEW, charge.key_id, charge.lease_id, self._lease_s, _lost(usage))

    def settle(self, charge: Charge, usage: Usage | None) -> asyncio.Future[None]:
        """Ends a lease."""
        used, line = (usage.token_count, usage.line()) if usage is not None else (0, "")
        ended = (charge.lease_id, charge.token_count, used, line)
        return self._run(_SETTLE, charge.key_id, *ended, *charge.limits.values())

    async def ping(self) -> None:
        """Connects, if need be, and has an answer."""
        await self._redis.ask("EXISTS", ACTIVE_KEY)

    async def sweep(self) -> None:
        """Settles the leases of gateways that died."""
        for base in await self._redis.ask("SMEMBERS", ACTIVE_KEY):
            await self._redis.run(_SWEEP, (base, USAGE_KEY, ACTIVE_KEY))

    async def close(self) -> None:
        """Drops the connection."""
        await self._redis.close()

    def _run(self, script: Script, key_id: str, *arguments: Word) -> asyncio.Future[Any]:
        return self._redis.run(script, (f"headrace:quota:{key_id}", USAGE_KEY, ACTIVE_KEY), arguments)


def refusal_of(charge: Charge, answer: Answer) -> Refusal | None:
    """What the script has decided."""
    if isinstance(answer, int):
        return None
    number, wait_ms = answer
    value, wait_s = charge.limits.values()[number - 1], wait_ms / 1000 if wait_ms >= 0 else None
    return Refusal(LIMIT_NAMES[number - 1], value, charge.token_count, wait_s)


def _lost(usage: Usage) -> str:
    return as_json({**usage.as_dict(), "outcome": "lost"})
