"""A streamed answer as blocking callers see it, and the call that most of them come over. Knows no stub."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self

import grpc

from headrace import errors
from headrace.answers import Answer, Delta, StreamMessage, error_of
from headrace.retries import Retry
from headrace.stream_facts import SourceFacts, StreamFacts


class Source(SourceFacts, Protocol):
    """Where the messages of a stream come from.

    Ending: `read` gives None at the end; `close` ends the generation, in whatever state and from any thread, and wakes
    a reader with Cancelled; `drop` does the same without waiting, for a stream that nobody refers to.
    """

    def read(self) -> StreamMessage | None:
        """The next message. Raises HeadraceError."""

    def close(self) -> None:
        """Ends the generation; does nothing if it has ended."""

    def drop(self) -> None:
        """As `close`, without waiting."""


class Stream(StreamFacts):
    """One streamed answer: iterate over its deltas, then read `answer`.

    `for` ends the call when the loop is left in any way; `next` leaves it open until `close`, the end of `with`, or
    until the stream is dropped. One thread iterates; any thread may close.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._source = source

    def __iter__(self) -> Iterator[Delta]:
        try:
            while True:
                try:
                    delta = next(self)
                except StopIteration:
                    return
                yield delta
        finally:
            self.close()

    def __next__(self) -> Delta:
        """The next delta.

        Raises:
            StopIteration: the answer is complete.
            errors.HeadraceError: the call failed.
        """
        if self._closed:
            raise StopIteration
        try:
            while (message := self._source.read()) is not None:
                delta = self._collector.take(message)
                if delta is not None:
                    return delta
            self._collector.finish()
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def read_all(self) -> Answer:
        """Reads to the end and returns the answer.

        Raises:
            errors.HeadraceError: the call failed.
        """
        for _ in self:
            pass
        return self.answer

    def close(self) -> None:
        """Ends the generation; does nothing if it has ended."""
        self._closed = True
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            self._source.drop()


class CallSource:
    """Messages of one `GenerateStream` call, or of a further one, while none has brought a message.

    Args:
        call: the open call.
        retry: when there is a further one; None: never.
        again: opens it.
    """

    stream_id = ""
    resume_count = 0

    def __init__(self, call: Any, retry: Retry | None = None, again: Callable[[], Any] | None = None) -> None:
        self.last_sequence_number = -1
        self._call, self._retry, self._again = call, retry, again
        self._closed = threading.Event()

    def read(self) -> StreamMessage | None:
        """The next message, None at the end. Raises HeadraceError."""
        while True:
            try:
                message: StreamMessage | None = next(self._call, None)
                break
            except grpc.RpcError as failure:
                error = errors.Cancelled("the stream was closed") if self._closed.is_set() else error_of(failure)
            wait_s = self._retry.wait_s(error) if self._retry and self.last_sequence_number < 0 else None
            if wait_s is None or self._again is None:
                raise error
            if self._closed.wait(wait_s):
                raise errors.Cancelled("the stream was closed")
            self._call = self._again()
        if message is not None:
            self.last_sequence_number = message.sequence_number
        return message

    def close(self) -> None:
        """Cancels the call."""
        self._closed.set()
        self._call.cancel()

    def drop(self) -> None:
        """Cancels the call."""
        self.close()
