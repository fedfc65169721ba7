"""The resumable deliveries of this process, and those that it takes over from the replay log. Knows no gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from headrace import errors
from headrace.v1 import stream_pb2
from services.common.logs import Log
from services.common.shared import SharedStateLost
from services.stream.delivery import Delivery
from services.stream.peers import Engines
from services.stream.replay import ReplayLog
from services.stream.session import Session

T = TypeVar("T")
Build = Callable[[stream_pb2.DeliverOpen], Delivery]


class Sessions:
    """The sessions of this process, and those that it takes over from the log.

    Args:
        build: makes an empty delivery for an opening.
        engines: attached engines.
        log: the replay log.
        detached_s: seconds that a session stays without a reader.
        engine_retry_s: seconds to look for another engine.
    """

    def __init__(
        self,
        build: Build,
        engines: Engines,
        log: ReplayLog,
        *,
        detached_s: float,
        engine_retry_s: float,
        diagnostics: Log,
    ) -> None:
        self._build, self._engines, self._log = build, engines, log
        self._detached_s, self._engine_retry_s, self._diagnostics = detached_s, engine_retry_s, diagnostics
        self._sessions: dict[str, Session] = {}

    async def open(self, opening: stream_pb2.DeliverOpen) -> Session:
        """A new session. Raises errors.Unavailable where the log cannot be reached: it would not be resumable."""
        try:
            epoch = await _uncancelled(self._log.create(opening.stream_id, opening.tenant, opening.SerializeToString()))
        except SharedStateLost as error:
            raise errors.Unavailable("the replay log cannot be reached; retry, or ask without resumable") from error
        return self._start(opening, epoch, [], granted=opening.generation.credit_count)

    async def resume(self, asked: stream_pb2.DeliverResume) -> Session:
        """The session to go on with, taken over from the log where it is not here.

        Raises:
            errors.NotFound: unknown, expired or another tenant's.
        """
        session = self._sessions.get(asked.stream_id)
        if session is None or not await _uncancelled(session.owned()):
            session = await self._take_over(asked)
        if session is None or session.opening.tenant != asked.tenant:
            raise errors.NotFound(
                f"stream_id {asked.stream_id!r} has nothing to resume",
                field="stream_id",
                reason=errors.Reason.STREAM_NOT_FOUND,
            )
        session.resume_count += 1
        return session

    async def _take_over(self, asked: stream_pb2.DeliverResume) -> Session | None:
        try:
            record = await _uncancelled(self._log.take_over(asked.stream_id, asked.tenant))
        except SharedStateLost as error:
            raise errors.Unavailable("the replay log cannot be reached; retry", retry_after_s=1.0) from error
        if record is None:
            return None
        earlier = self._sessions.pop(asked.stream_id, None)
        if earlier is not None:
            await earlier.close()
        entries = [stream_pb2.DeliverResponse.FromString(entry) for entry in record.entries]
        made = sum(entry.delta.token_count for entry in entries)
        opening = stream_pb2.DeliverOpen.FromString(record.opening)
        return self._start(opening, record.epoch, entries, granted=made)

    def _start(
        self, opening: stream_pb2.DeliverOpen, epoch: int, entries: list[stream_pb2.DeliverResponse], *, granted: int
    ) -> Session:
        delivery = self._build(opening)
        deltas = [entry.delta for entry in entries if entry.HasField("delta")]
        if deltas:
            made = [token_id for delta in deltas for token_id in delta.token_ids]
            delivery.go_on_after(made, "".join(delta.text for delta in deltas), len(deltas))
        session = Session(
            opening,
            delivery,
            self._engines,
            self._log,
            epoch=epoch,
            entries=entries,
            granted=granted,
            engine_retry_s=self._engine_retry_s,
            diagnostics=self._diagnostics,
        )
        self._sessions[opening.stream_id] = session
        session.start()
        return session

    async def sweep(self) -> None:
        """Drops sessions that have been without a reader for too long, for ever."""
        while True:
            await asyncio.sleep(min(1.0, self._detached_s / 2 + 0.01))
            now = time.monotonic()
            for stream_id, session in list(self._sessions.items()):
                since = session.detached_since
                if since is not None and now - since >= self._detached_s:
                    del self._sessions[stream_id]
                    await session.close()

    async def close(self) -> None:
        """Drops every session; the log keeps them."""
        sessions, self._sessions = self._sessions, {}
        await asyncio.gather(*(session.close() for session in sessions.values()))
        await self._log.close()


async def _uncancelled(work: Awaitable[T]) -> T:
    """Awaits work that a cancelled caller must not interrupt half-way."""
    return await asyncio.shield(asyncio.ensure_future(work))
