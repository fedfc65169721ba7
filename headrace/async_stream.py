"""A streamed answer as asyncio callers see it, and the call that most of them come over. Knows no stub.

A stream ends its call on every way out: at the end, on `break`, on an exception, when it is dropped. grpcio itself does
not cancel a call that is only forgotten, and the engine would go on generating for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Protocol, Self

import grpc.aio

from headrace import errors
from headrace.answers import Answer, Delta, StreamMessage, error_of
from headrace.retries import Retry
from headrace.stream_facts import SourceFacts, StreamFacts


class Source(SourceFacts, Protocol):
    """Where the messages of a stream come from.

    Ending: `read` gives None at the end; `close` ends the generation, in whatever state, and wakes a reader with
    Cancelled; `drop` does the same without waiting, for a stream that nobody refers to.
    """

    async def read(self) -> StreamMessage | None:
        """The next message. Raises HeadraceError."""

    async def close(self) -> None:
        """Ends the generation; does nothing if it has ended."""

    def drop(self) -> None:
        """As `close`, on the event loop, without waiting."""


class AsyncStream(StreamFacts):
    """One streamed answer: iterate over its deltas, then read `answer`.

    `async for` ends the call when the loop is left in any way; `anext` leaves it open until `aclose`, the end of
    `async with`, or until the stream is dropped.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._source = source
        self._loop = asyncio.get_running_loop()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            while True:
                try:
                    delta = await anext(self)
                except StopAsyncIteration:
                    return
                yield delta
        finally:
            await self.aclose()

    async def __anext__(self) -> Delta:
        """The next delta.

        Raises:
            StopAsyncIteration: the answer is complete.
            errors.HeadraceError: the call failed.
        """
        if self._closed:
            raise StopAsyncIteration
        try:
            while (message := await self._source.read()) is not None:
                delta = self._collector.take(message)
                if delta is not None:
                    return delta
            self._collector.finish()
        except BaseException:
            await self.aclose()
            raise
        await self.aclose()
        raise StopAsyncIteration

    async def read_all(self) -> Answer:
        """Reads to the end and returns the answer.

        Raises:
            errors.HeadraceError: the call failed.
        """
        async for _ in self:
            pass
        return self.answer

    async def aclose(self) -> None:
        """Ends the generation; does nothing if it has ended."""
        self._closed = True
        await self._source.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._source.drop)  # collected on whichever thread


class CallSource:
    """Messages of one `GenerateStream` call, or of a further one, while none has brought a message.

    Args:
        call: the open call.
        retry: when there is a further one; None: never.
        again: opens it.
    """

    stream_id = ""
    resume_count = 0

    def __init__(
        self,
        call: grpc.aio.UnaryStreamCall[Any, Any],
        retry: Retry | None = None,
        again: Callable[[], grpc.aio.UnaryStreamCall[Any, Any]] | None = None,
    ) -> None:
        self.last_sequence_number = -1
        self._call, self._retry, self._again = call, retry, again
        self._closed = asyncio.Event()

    async def read(self) -> StreamMessage | None:
        """The next message, None at the end. Raises HeadraceError."""
        while True:
            try:
                return await self._read()
            except errors.HeadraceError as error:
                wait_s = self._retry.wait_s(error) if self._retry and self.last_sequence_number < 0 else None
                if wait_s is None or self._again is None or self._closed.is_set():
                    raise
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), wait_s)
                raise errors.Cancelled("the stream was closed")
            self._call = self._again()

    async def _read(self) -> StreamMessage | None:
        try:
            message: Any = await self._call.read()
        except grpc.aio.AioRpcError as failure:
            raise error_of(failure) from None
        except asyncio.CancelledError:
            if ended_elsewhere():
                raise errors.Cancelled("the stream was closed") from None
            raise
        if message is grpc.aio.EOF:
            return None
        self.last_sequence_number = message.sequence_number
        taken: StreamMessage = message
        return taken

    async def close(self) -> None:
        """Cancels the call."""
        self.drop()

    def drop(self) -> None:
        """Cancels the call."""
        self._closed.set()
        self._call.cancel()


def ended_elsewhere() -> bool:
    """Whether a read was cancelled by somebody who ended the call, and not because its own task was cancelled."""
    task = asyncio.current_task()
    return task is not None and not task.cancelling()
