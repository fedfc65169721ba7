"""What a key may use, and what it has used: the interface, and the implementation inside one process. Knows no gRPC.

Work is reserved before it starts, prompt and largest answer together, and settled to what was used when it ends,
however it ends. Requests and tokens a minute are token buckets: full at first, refilled evenly, never over the limit.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Protocol

from headrace.errors import Reason, ResourceExhausted
from headrace.v1 import generation_pb2
from services.gateway.identity import Limits

MINUTE_S = 60.0
DAY_S = 86_400
CONCURRENT_RETRY_S = 1.0
LIMIT_NAMES = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "tokens_per_day")


@dataclass(frozen=True, slots=True)
class Charge:
    """One request's claim.

    Attributes:
        lease_id: the request's own id.
        key_id: whose limits.
        limits: those limits.
        token_count: to reserve: prompt and largest answer.
    """

    lease_id: str
    key_id: str
    limits: Limits
    token_count: int


@dataclass(slots=True)
class Usage:
    """What a request used; a line of the usage log."""

    request_id: str
    tenant: str
    key_id: str
    model: str
    method: str = ""
    outcome: str = "lost"  # finish reason, reason of the error, or lost: its gateway died
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ended_at: float = 0.0  # unix time, seconds

    @property
    def token_count(self) -> int:
        """What is charged."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def computed(self) -> int:
        """Tokens that engines computed for it."""
        return max(0, self.prompt_tokens - self.cached_tokens) + self.completion_tokens

    def take(self, used: generation_pb2.Usage, endings: Sequence[generation_pb2.Ending]) -> None:
        """It ended well, and this is the engine's account."""
        self.prompt_tokens, self.cached_tokens = used.prompt_token_count, used.cached_token_count
        self.completion_tokens, self.outcome = used.completion_token_count, outcome_of(endings)

    def as_dict(self) -> dict[str, str | int | float]:
        """By field; `dataclasses.asdict` would copy each value deeply, for 50 us a request."""
        return {name: getattr(self, name) for name in USAGE_FIELDS}

    def line(self) -> str:
        """As JSON."""
        return as_json(self.as_dict())


as_json = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` would make an encoder each time
USAGE_FIELDS = tuple(one.name for one in fields(Usage))


def outcome_of(endings: Sequence[generation_pb2.Ending]) -> str:
    """The first answer's finish reason, in lower case."""
    first = endings[0].finish_reason if endings else generation_pb2.FINISH_REASON_UNSPECIFIED
    return generation_pb2.FinishReason.Name(first).removeprefix("FINISH_REASON_").lower()


@dataclass(frozen=True, slots=True)
class Refusal:
    """A limit that is reached; `wait_s` None: waiting does not help."""

    limit: str
    value: int
    asked: int
    wait_s: float | None

    def error(self) -> ResourceExhausted:
        """What the caller is told."""
        used = f"asks for {self.asked} tokens" if self.limit.startswith("tokens") else "is one too many"
        return ResourceExhausted(
            f"this request {used}; the limit {self.limit} of its key is {self.value}",
            reason=Reason.QUOTA_EXCEEDED,
            retry_after_s=self.wait_s,
            quota=f"{self.limit}={self.value}",
        )


class Quotas(Protocol):
    """Decides and keeps account. Every call may be repeated: the second time changes nothing.

    Raises SharedStateLost where the state is elsewhere and does not answer.
    """

    async def reserve(self, charge: Charge) -> Refusal | None:
        """Takes a lease on what is asked; None: granted. A refusal charges nothing."""

    async def renew(self, charge: Charge, usage: Usage) -> None:
        """The request is still running, and has used so much."""

    def settle(self, charge: Charge, usage: Usage | None) -> Awaitable[None]:
        """Ends the lease: charges what was used and writes it down, once. None: nothing was begun, nothing is owed."""

    async def close(self) -> None:
        """Closes connections and files."""


@dataclass(slots=True)
class _Bucket:
    level: float
    at: float


@dataclass(slots=True)
class _Account:
    buckets: dict[str, _Bucket] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)  # id → day
    spent: dict[int, int] = field(default_factory=dict)  # day → tokens


class MemoryQuotas:
    """Quotas of one gateway, in its memory.

    Args:
        log: where usage is written; None: nowhere.
        now: unix time in seconds.
    """

    def __init__(self, log: UsageFile | None = None, now: Callable[[], float] = time.time) -> None:
        self._log, self._now = log, now
        self._accounts: dict[str, _Account] = {}

    async def reserve(self, charge: Charge) -> Refusal | None:
        """Takes a lease."""
        account = self._accounts.setdefault(charge.key_id, _Account())
        if charge.lease_id in account.leases:
            return None
        now, limits, asked = self._now(), charge.limits, charge.token_count
        day = int(now // DAY_S)
        requests = self._bucket(account, "requests", limits.requests_per_minute, now)
        tokens = self._bucket(account, "tokens", limits.tokens_per_minute, now)
        spent = account.spent.get(day, 0)
        waits: tuple[float | None, ...] = (
            _wait(requests, 1, limits.requests_per_minute),
            _wait(tokens, asked, limits.tokens_per_minute),
            CONCURRENT_RETRY_S if 0 < limits.concurrent_requests <= len(account.leases) else 0.0,
            _until_tomorrow(spent, asked, limits.tokens_per_day, now),
        )
        for name, value, wait_s in zip(LIMIT_NAMES, limits.values(), waits, strict=True):
            if wait_s != 0.0:
                return Refusal(name, value, asked, wait_s)
        requests.level -= 1
        tokens.level -= asked
        account.spent = {day: spent + asked}
        account.leases[charge.lease_id] = day
        return None

    async def renew(self, charge: Charge, usage: Usage) -> None:
        """Nothing: a lease in memory dies with its gateway."""

    async def settle(self, charge: Charge, usage: Usage | None) -> None:
        """Ends the lease."""
        account = self._accounts.get(charge.key_id)
        day = account.leases.pop(charge.lease_id, None) if account is not None else None
        if account is None or day is None:
            return
        now, used = self._now(), usage.token_count if usage is not None else 0
        if not used:
            self._bucket(account, "requests", charge.limits.requests_per_minute, now).level += 1
        self._bucket(account, "tokens", charge.limits.tokens_per_minute, now).level += charge.token_count - used
        if day in account.spent:
            account.spent[day] += used - charge.token_count
        if usage is not None and self._log is not None:
            self._log.append(usage)

    async def close(self) -> None:
        """Closes the log."""
        if self._log is not None:
            self._log.close()

    def spent_today(self, key_id: str) -> int:
        """Tokens charged to a key since midnight."""
        return self._accounts.get(key_id, _Account()).spent.get(int(self._now() // DAY_S), 0)

    def _bucket(self, account: _Account, name: str, capacity: int, now: float) -> _Bucket:
        if not capacity:
            return _Bucket(0, now)
        bucket = account.buckets.setdefault(name, _Bucket(capacity, now))
        bucket.level = min(capacity, bucket.level + max(0.0, now - bucket.at) * capacity / MINUTE_S)
        bucket.at = max(bucket.at, now)
        return bucket


class UsageFile:
    """The usage log as a file of JSON lines, each written whole, by one system call, at its end."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def append(self, usage: Usage) -> None:
        """Writes a line."""
        os.write(self._file, f"{usage.line()}\n".encode())

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)


def _wait(bucket: _Bucket, asked: int, capacity: int) -> float | None:
    """Seconds until a bucket holds what is asked; 0: now; None: never."""
    if not capacity or bucket.level >= asked - 1e-6:
        return 0.0
    if asked > capacity:
        return None
    return (asked - bucket.level) * MINUTE_S / capacity


def _until_tomorrow(spent: int, asked: int, budget: int, now: float) -> float | None:
    if not budget or spent + asked <= budget:
        return 0.0
    return None if asked > budget else DAY_S - now % DAY_S
