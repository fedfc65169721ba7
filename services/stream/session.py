"""A resumable delivery: it outlives its reader, its engine and, with a shared replay log, its process. Knows no gRPC.

    engine ──► Delivery ──► pump: number, write to the log, then show ──► reader (a `Deliver` call, one at a time)

The pump runs on its own. A reader that goes away leaves the generation running within its credits for `detached_s`; a
lost engine is replaced, going on after the tokens that were made; a newer reader supersedes an older one.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import time
from collections.abc import AsyncGenerator

from google.rpc import status_pb2

from headrace import errors
from headrace.v1 import engine_pb2, stream_pb2
from services.common.logs import Log
from services.common.shared import SharedStateLost
from services.stream.delivery import Delivery
from services.stream.peers import Engines
from services.stream.replay import LogFull, ReplayLog, Superseded

ENGINE_RETRY_FIRST_S = 0.1
ENGINE_RETRY_MOST_S = 1.0


class Session:
    """One resumable delivery in this process.

    Args:
        opening: what the gateway asked; its generation carries an explicit seed.
        delivery: empty, or gone on after the entries.
        epoch: of the replay log, for this owner.
        entries: what was sent already, by sequence number.
        granted: tokens that the engine may have generated when it is opened; a reader's credits add to them.
        engine_retry_s: seconds to look for another engine.
    """

    def __init__(
        self,
        opening: stream_pb2.DeliverOpen,
        delivery: Delivery,
        engines: Engines,
        log: ReplayLog,
        *,
        epoch: int,
        entries: list[stream_pb2.DeliverResponse],
        granted: int,
        engine_retry_s: float,
        diagnostics: Log,
    ) -> None:
        self.opening, self.delivery = opening, delivery
        self.resume_count = 0
        self.detached_since: float | None = time.monotonic()
        self._engines, self._log, self._diagnostics = engines, log, diagnostics
        self._epoch, self._engine_retry_s = epoch, engine_retry_s
        self._logged = True  # until the log fails: then only this process can resume the stream
        self._entries = entries
        self._reader: asyncio.Event | None = None  # the present reader's wake-up; another's object: superseded
        self._superseded = False
        self._granted = granted  # tokens that the engine may have generated
        self._allowed = 0  # tokens that the reader may have been sent
        timeout_ns = opening.generation.timeout_ns if opening.generation.HasField("timeout_ns") else None
        self._deadline_ns = None if timeout_ns is None else time.monotonic_ns() + timeout_ns
        self._pump: asyncio.Task[None] | None = None

    @property
    def finished(self) -> bool:
        """Whether the last entry is there: a final message or a failure."""
        return bool(self._entries) and not self._entries[-1].HasField("delta")

    async def owned(self) -> bool:
        """Whether the stream is still this process's to go on with; where the log cannot say, it is."""
        if self._superseded or not self._logged:
            return not self._superseded
        try:
            return await self._log.owns(self.opening.stream_id, self._epoch)
        except SharedStateLost:
            return True

    def start(self) -> None:
        """Opens the generation and starts the pump; a finished session has neither."""
        if not self.finished:
            context = contextvars.Context()  # no caller's trace may stick to it
            self._pump = asyncio.get_running_loop().create_task(self._run(), context=context)

    async def read(self, first: int, credit_count: int) -> AsyncGenerator[stream_pb2.DeliverResponse, None]:
        """Entries from a sequence number on, as they come, up to the last one.

        Args:
            first: sequence number of the first.
            credit_count: tokens that may be sent beyond the entries before `first`.

        Raises:
            errors.InvalidArgument: `first` is beyond what was ever sent.
            errors.Aborted: a newer reader came.
            errors.HeadraceError: how the delivery failed.
        """
        if not 0 <= first <= len(self._entries) or (self.finished and first == len(self._entries)):
            raise errors.InvalidArgument(
                f"last_sequence_number is {first - 1}; expected -1 to {len(self._entries) - 1 - self.finished}",
                field="last_sequence_number",
            )
        if self._reader is not None:
            self._reader.set()  # an earlier reader sees that it is superseded
        reader = self._reader = asyncio.Event()
        self.detached_since = None
        sent = sum(entry.delta.token_count for entry in self._entries[:first])
        self._allowed = 0
        self._allow(sent + credit_count)
        try:
            for number in itertools.count(first):
                while not self._may_send(number, sent, reader):
                    reader.clear()
                    await reader.wait()
                if self._superseded or reader is not self._reader:
                    raise errors.Aborted("another reader resumed the stream")
                entry = self._entries[number]
                if entry.HasField("failure"):
                    raise errors.from_status(status_pb2.Status.FromString(entry.failure))
                sent += entry.delta.token_count
                yield entry
                if entry.HasField("final"):
                    return
        finally:
            if reader is self._reader:
                self.detached_since = time.monotonic()

    def grant(self, credit_count: int) -> None:
        """The reader may be sent this many tokens more."""
        self._allow(self._allowed + credit_count)
        self._notify()

    async def cancel(self) -> None:
        """Ends the generation for good; a reader that is there ends with CANCELLED."""
        self.delivery.on_lost(errors.Cancelled("cancelled by the reader"))
        if self._pump is not None:
            await asyncio.wait({self._pump})

    async def close(self) -> None:
        """Drops the session from this process; the log keeps it for as long as it does."""
        if self.delivery.generation is not None:
            self.delivery.generation.abandon()
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        self._superseded = True
        self._notify()

    # --- the pump ---------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Publishes every message, then the final one or the failure."""
        delivery = self.delivery
        try:
            self._open(self.opening.engine_address)
            while True:
                delivery.wake.clear()
                delta = delivery.take()
                if delta is not None:
                    await self._publish(stream_pb2.DeliverResponse(delta=delta))
                elif delivery.ended:
                    final = delivery.final()
                    final.resume_count = self.resume_count
                    await self._publish(stream_pb2.DeliverResponse(final=final))
                    return
                elif delivery.lost is not None:
                    await self._replace_engine(delivery.lost)
                else:
                    await delivery.wake.wait()
        except Superseded:
            self._superseded = True
            self._notify()
        except errors.HeadraceError as error:
            await self._fail(error)
        except Exception as error:  # noqa: BLE001 - a reader must never wait for a pump that is gone
            self._diagnostics.error("session failed", stream_id=self.opening.stream_id, exc_info=error)
            await self._fail(errors.Internal("the stream failed"))
        finally:
            if delivery.generation is not None:
                delivery.generation.abandon()

    async def _fail(self, error: errors.HeadraceError) -> None:
        status = errors.to_status(error).SerializeToString()
        try:
            await self._publish(stream_pb2.DeliverResponse(failure=status))
        except Superseded:
            self._superseded = True
            self._notify()

    async def _publish(self, entry: stream_pb2.DeliverResponse) -> None:
        """Numbers an entry and writes it to the log before any reader sees it."""
        entry.sequence_number = len(self._entries)
        if self._logged:
            try:
                await self._log.append(
                    self.opening.stream_id, self._epoch, entry.sequence_number, entry.SerializeToString()
                )
            except (SharedStateLost, LogFull) as error:
                self._logged = False
                self._diagnostics.warning(
                    "replay log failed; only this process can resume the stream now",
                    stream_id=self.opening.stream_id,
                    reason=f"{type(error).__name__}: {error}",
                )
        self._entries.append(entry)
        self._notify()

    async def _replace_engine(self, lost: errors.HeadraceError) -> None:
        """Goes on, on an engine that answers, after the tokens that were made; raises `lost` when none is found."""
        if not isinstance(lost, errors.Unavailable):
            raise lost
        addresses = itertools.cycle([*self.opening.fallback_engine_addresses, self.opening.engine_address])
        give_up = time.monotonic() + self._engine_retry_s
        pause_s = ENGINE_RETRY_FIRST_S
        while time.monotonic() < give_up:
            address = next(addresses)
            if await self._engines.reachable(address):
                self.resume_count += 1
                self.delivery.lost = None
                self._open(address)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, ENGINE_RETRY_MOST_S)
        raise lost

    def _open(self, address: str) -> None:
        """Opens the generation, going on after the tokens that the relay has taken."""
        if self.delivery.end_if_stopped():
            return
        command = engine_pb2.OpenGeneration()
        command.CopyFrom(self.opening.generation)
        command.generated_token_ids[:] = self.delivery.token_ids
        command.credit_count = max(0, self._granted - len(self.delivery.token_ids))
        if self._deadline_ns is not None:
            command.timeout_ns = self._deadline_ns - time.monotonic_ns()
            if command.timeout_ns <= 0:
                raise errors.DeadlineExceeded("the deadline has passed")
        self.delivery.opened_ns = time.monotonic_ns()
        self.delivery.generation = self._engines.at(address).open(command, self.delivery)

    # --- credits and readers ------------------------------------------------------------------------------

    def _allow(self, token_count: int) -> None:
        """The reader may have been sent `token_count` tokens; the engine may have made as many."""
        self._allowed = max(self._allowed, token_count)
        if self._allowed > self._granted:
            more, self._granted = self._allowed - self._granted, self._allowed
            if self.delivery.generation is not None:
                self.delivery.generation.grant(more)

    def _may_send(self, number: int, sent: int, reader: asyncio.Event) -> bool:
        if self._superseded or reader is not self._reader:
            return True
        if number >= len(self._entries):
            return False
        return not self._entries[number].HasField("delta") or sent < self._allowed

    def _notify(self) -> None:
        if self._reader is not None:
            self._reader.set()
