"""What a client must remember of a stream to go on with it after its connection was lost. Knows no connection.

The one idea: a stream is a numbered list of messages that outlives any connection. A connection only carries some of
them; whoever knows the last number seen can ask for the rest. A transport, blocking or not, drives one `Session`:

    connect    → first_command, timeout_s
    a message  → receive: the message, or None where the caller has nothing of it
    the caller comes back for more → grant: the command that lets more be generated, or None
    the connection is lost → lost: seconds to wait before the next one, or the error that ends the stream

Credits: the caller may be ahead by at most `window` tokens of each answer. They are granted as deltas are taken, a
quarter of the window at a time; a new connection begins with a whole window after the last message seen.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from headrace import errors
from headrace.v1 import gateway_pb2, generation_pb2

DEFAULT_WINDOW = 64  # tokens
DEFAULT_RESUME_TIMEOUT_S = 60.0
FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 2.0
GOODBYE_S = 1.0  # how long an early end waits for the server to confirm it

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How a session is kept up."""

    window: int = DEFAULT_WINDOW  # tokens of each answer that may be generated beyond what the caller took
    resumable: bool = True
    resume_timeout_s: float = DEFAULT_RESUME_TIMEOUT_S  # without a connection, counted since the last new message


class Session:
    """One stream over all its connections.

    Args:
        opening: what to generate; None: the stream exists, `stream_id` names it.
        options: window and resuming.
        timeout_s: the caller's deadline, from now; None: none.
        stream_id: the stream to go on with.
        last_sequence_number: of that stream, the last message seen; -1: none.
        clock: monotonic seconds.
        draw: a number from 0 to 1, for jitter.

    Raises:
        errors.InvalidArgument: there is nothing to open and nothing to resume.

    Attributes:
        stream_id: names the stream in `resume`; "" before the server has told, or where it is not resumable.
        last_sequence_number: the last message seen; -1: none.
        resume_count: how often the stream went on over a new connection.
        finished: whether the final message has come.
    """

    def __init__(
        self,
        opening: generation_pb2.Generation | None,
        options: SessionOptions,
        *,
        timeout_s: float | None = None,
        stream_id: str = "",
        last_sequence_number: int = -1,
        clock: Clock = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        if opening is None and not stream_id:
            raise errors.InvalidArgument("resume.stream_id is empty", field="resume.stream_id")
        self.stream_id = stream_id
        self.last_sequence_number = last_sequence_number
        self.resume_count = 0
        self.finished = False
        self._opening, self._options = opening, options
        self._clock, self._draw = clock, draw
        self._deadline = None if timeout_s is None else clock() + timeout_s
        self._owed: dict[int, int] = defaultdict(int)  # tokens taken and not granted again, by answer
        self._grant_at = max(1, options.window // 4)
        self._due: gateway_pb2.GenerateSessionRequest | None = None
        self._resuming = False  # the present connection goes on with what another one began
        self._attempts = 0  # since the last new message
        self._lost_since: float | None = None  # None while a connection is there
        self._without_s = 0.0  # seconds without a connection, since the last new message; the present ones not counted

    def first_command(self) -> gateway_pb2.GenerateSessionRequest:
        """The command that a new connection begins with. Raises InvalidArgument if no message can hold it."""
        self._owed.clear()
        self._due = None
        window = self._options.window
        try:
            if not self.stream_id:
                opening = gateway_pb2.SessionOpen(generation=self._opening, credit_count=window)
                return gateway_pb2.GenerateSessionRequest(open=opening)
            resume = gateway_pb2.SessionResume(
                stream_id=self.stream_id, last_sequence_number=self.last_sequence_number, credit_count=window
            )
            return gateway_pb2.GenerateSessionRequest(resume=resume)
        except ValueError:
            field = "resume" if self.stream_id else "open"
            raise errors.InvalidArgument(f"{field}: a number is out of range", field=field) from None

    def timeout_s(self) -> float | None:
        """Seconds that are left of the caller's time; None without a deadline. Raises DeadlineExceeded."""
        if self._deadline is None:
            return None
        left = self._deadline - self._clock()
        if left <= 0:
            raise errors.DeadlineExceeded("the deadline has passed")
        return left

    def receive(self, message: gateway_pb2.GenerateSessionResponse) -> gateway_pb2.GenerateSessionResponse | None:
        """Takes a message of the connection; gives it back if the caller has not had it.

        Raises:
            errors.Internal: messages are missing.
        """
        self._connected()
        if message.HasField("opened"):
            self.stream_id = message.opened.stream_id or self.stream_id
            return None
        number, expected = message.sequence_number, self.last_sequence_number + 1
        if number < expected:
            return None
        if number > expected:
            raise errors.Internal(f"message {number} of the stream came where {expected} was expected")
        self.last_sequence_number = number
        self._attempts, self._without_s = 0, 0.0
        if message.HasField("final"):
            self.finished = True
            return message
        if not message.HasField("delta"):
            return None  # something of a newer server
        self._take(message.delta)
        return message

    def grant(self) -> gateway_pb2.GenerateSessionRequest | None:
        """The caller has come back for more: credits for what it took, where that is enough to be worth a message."""
        due, self._due = self._due, None
        return due

    def lost(self, error: errors.HeadraceError, *, by_transport: bool) -> float:
        """The connection has ended with an error; seconds to wait before the next one.

        Args:
            error: what it ended with.
            by_transport: it says that the connection or a process is gone, and nothing about the request.

        Raises:
            errors.HeadraceError: that error, where another connection cannot help or has been tried for long enough.
        """
        begun = bool(self.stream_id)
        if not by_transport or not self._options.resumable or (not begun and self.last_sequence_number >= 0):
            raise error
        now = self._clock()
        if self._lost_since is None:
            self._lost_since = now
        self._attempts += 1
        self._resuming = begun
        longest = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(self._attempts - 1, 16))
        wait_s = max(longest * (0.5 + 0.5 * self._draw()), error.retry_after_s or 0.0)
        if self._without_s + (now - self._lost_since) + wait_s > self._options.resume_timeout_s:
            raise error
        return wait_s if self._deadline is None else max(0.0, min(wait_s, self._deadline - now))

    def _connected(self) -> None:
        if self._lost_since is not None:
            self._without_s += self._clock() - self._lost_since
            self._lost_since = None
        if self._resuming:
            self._resuming = False
            self.resume_count += 1

    def _take(self, delta: gateway_pb2.Delta) -> None:
        owed = self._owed[delta.index] + delta.token_count
        if owed >= self._grant_at:
            taken = gateway_pb2.SessionCredits(credit_count=owed, index=delta.index)
            self._due = gateway_pb2.GenerateSessionRequest(credits=taken)
            owed = 0
        self._owed[delta.index] = owed


def cancel_command() -> gateway_pb2.GenerateSessionRequest:
    """Ends the generation for good."""
    return gateway_pb2.GenerateSessionRequest(cancel=gateway_pb2.SessionCancel())
