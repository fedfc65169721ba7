"""The replay log: what a resumable stream has sent, kept so that another call, or another process, can go on.

One interface, two implementations: `MemoryLog` here, for one stream process, and `RedisLog` for several, or for one
that may be restarted. Entries are opaque bytes, numbered 0, 1, 2, ... in the order of sending, and written before they
are sent. Each stream has one owner at a time: taking it over raises its epoch, and an append with an older epoch fails.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

MAX_STREAM_BYTES = 16 << 20  # of one stream's entries
MAX_LOG_BYTES = 256 << 20  # of all streams in a MemoryLog


class Superseded(Exception):
    """Another owner has taken the stream over."""


class LogFull(Exception):
    """The stream's entries are larger than `MAX_STREAM_BYTES`."""


@dataclass(slots=True)
class Record:
    """One stream as the log has it."""

    tenant: str
    opening: bytes
    epoch: int = 1
    entries: list[bytes] = field(default_factory=list)
    entry_bytes: int = 0  # of all entries, kept by MemoryLog


class ReplayLog(Protocol):
    """What a stream process needs of a log. Every method may raise SharedStateLost."""

    async def create(self, stream_id: str, tenant: str, opening: bytes) -> int:
        """Starts a stream; returns its epoch."""

    async def append(self, stream_id: str, epoch: int, sequence_number: int, entry: bytes) -> None:
        """Adds the entry of that number. Raises Superseded, also when the stream has expired, and LogFull."""

    async def owns(self, stream_id: str, epoch: int) -> bool:
        """Whether nobody has taken the stream over since `epoch`, and it has not expired."""

    async def take_over(self, stream_id: str, tenant: str) -> Record | None:
        """Makes the caller the owner; None where there is no such stream of that tenant."""

    async def close(self) -> None:
        """Frees what is held."""


class MemoryLog:
    """A log in this process: bounded in time and bytes, the least recently used stream goes first.

    Args:
        ttl_s: seconds that a stream is kept after its last entry.
        clock: monotonic seconds.
    """

    def __init__(self, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s, self._clock = ttl_s, clock
        self._streams: OrderedDict[str, tuple[float, Record]] = OrderedDict()
        self.size_bytes = 0

    async def create(self, stream_id: str, tenant: str, opening: bytes) -> int:
        """Starts a stream; returns its epoch."""
        record = Record(tenant, opening)
        self.size_bytes += len(opening)
        self._touch(stream_id, record)
        return record.epoch

    async def append(self, stream_id: str, epoch: int, sequence_number: int, entry: bytes) -> None:
        """Adds the entry of that number."""
        record = self._find(stream_id)
        if record is None or record.epoch != epoch or len(record.entries) != sequence_number:
            raise Superseded(stream_id)
        if record.entry_bytes + len(entry) > MAX_STREAM_BYTES:
            raise LogFull(stream_id)
        record.entries.append(entry)
        record.entry_bytes += len(entry)
        self.size_bytes += len(entry)
        self._touch(stream_id, record)

    async def owns(self, stream_id: str, epoch: int) -> bool:
        """Whether nobody has taken the stream over since."""
        record = self._find(stream_id)
        return record is not None and record.epoch == epoch

    async def take_over(self, stream_id: str, tenant: str) -> Record | None:
        """Makes the caller the owner."""
        record = self._find(stream_id)
        if record is None or record.tenant != tenant:
            return None
        record.epoch += 1
        self._touch(stream_id, record)
        return Record(record.tenant, record.opening, record.epoch, list(record.entries))

    async def close(self) -> None:
        """Forgets everything."""
        self._streams.clear()
        self.size_bytes = 0

    def _find(self, stream_id: str) -> Record | None:
        expires, record = self._streams.get(stream_id, (0.0, None))
        return record if record is not None and expires > self._clock() else None

    def _touch(self, stream_id: str, record: Record) -> None:
        now = self._clock()
        self._streams[stream_id] = (now + self._ttl_s, record)
        self._streams.move_to_end(stream_id)
        while self._streams:
            oldest, (expires, _) = next(iter(self._streams.items()))
            if expires > now and (self.size_bytes <= MAX_LOG_BYTES or oldest == stream_id):
                break
            _, (_, gone) = self._streams.popitem(last=False)
            self.size_bytes -= len(gone.opening) + gone.entry_bytes
