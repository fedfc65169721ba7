"""One relay: a request's token ids become text messages. Knows no connection and no event loop.

Everything counts in tokens. A message is due when it is the first, when it is full, when the time is up, or when the
answer has ended; it carries all pending tokens, also those whose text is held back (half a character, the beginning of
a stop string), so that the reader's credits flow whatever the text does. What is pending is bounded by the credits that
the engine holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.stream.stops import StopMatcher


class Detokenizer(Protocol):
    """Incremental: the concatenation of all results is the text of all ids."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that is certain now."""

    def finish(self) -> str:
        """What was held back; nothing may follow."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message carries. `token_ids` are those that it accounts for, in order, and `logprobs` theirs."""

    text: str
    token_ids: list[int]
    logprobs: list[Any]


@dataclass(slots=True)
class RelayStatistics:
    """What one relay did. Durations in nanoseconds, monotonic times in nanoseconds, 0: not yet."""

    first_token_ns: int = 0
    last_token_ns: int = 0
    first_sent_ns: int = 0
    detokenize_ns: int = 0
    detokenize_count: int = 0
    message_count: int = 0
    token_count: int = 0


@dataclass(slots=True)
class Relay:
    """Text of one answer.

    Args:
        detokenizer: of this answer alone.
        stops: of this answer alone.
        min_tokens: stop strings that are complete before this many tokens do not count.
        coalesce_tokens: tokens that fill a message.
        coalesce_ns: nanoseconds after the last message when the next leaves unfilled.
        whole: one message at the end.
        clock: monotonic nanoseconds.
    """

    detokenizer: Detokenizer
    stops: StopMatcher
    min_tokens: int = 0
    coalesce_tokens: int = 4
    coalesce_ns: int = 40_000_000
    whole: bool = False
    clock: Callable[[], int] = time.monotonic_ns
    matched_stop: str | None = None
    ended: bool = False
    statistics: RelayStatistics = field(default_factory=RelayStatistics)
    _text: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[Any] = field(default_factory=list)
    _last_sent_ns: int = 0
    _skip: int = 0  # characters that an earlier relay has sent and this one has not released yet

    def push(self, token_ids: Sequence[int], logprobs: Sequence[Any] = (), *, ending_token: bool = False) -> bool:
        """Takes new tokens from the engine; whatever follows a matched stop string is ignored.

        Args:
            token_ids: in order.
            logprobs: one entry for each of them, or none at all; passed on as they are.
            ending_token: the last of them ended the answer: it counts, and its text is not sent.

        Returns:
            True when this completed a stop string: the engine should be told to stop.
        """
        if not token_ids:
            return False
        began = self.clock()
        if self.matched_stop is not None:
            self.statistics.last_token_ns = began  # the engine counts it as decoding, so the tail begins after it
            return False
        statistics = self.statistics
        statistics.first_token_ns = statistics.first_token_ns or began
        statistics.last_token_ns = began
        visible = len(token_ids) - ending_token
        for position, token_id in enumerate(token_ids):
            self._token_ids.append(token_id)
            self._logprobs += logprobs[position : position + 1]
            statistics.token_count += 1
            if position < visible and self._push_text(self.detokenizer.push((token_id,))):
                break
        statistics.detokenize_ns += self.clock() - began
        statistics.detokenize_count += 1
        return self.matched_stop is not None

    def go_on_after(self, token_ids: Sequence[int], sent: str) -> None:
        """Takes the state of an earlier relay that had sent `sent` for these tokens: nothing of it is sent again."""
        self.push(token_ids)
        released = sum(map(len, self._text))
        self._skip = max(0, len(sent) - released)
        self._text, self._token_ids, self._logprobs = [], [], []
        self._last_sent_ns = self.clock()

    def end(self) -> None:
        """The engine has ended the answer: releases what is held back. Idempotent."""
        if self.ended:
            return
        if self.matched_stop is None and not self._push_text(self.detokenizer.finish()):
            self._text.append(self.stops.finish())
        self.ended = True

    def _push_text(self, text: str) -> bool:
        if not text:
            return False
        released, matched = self.stops.push(text, armed=self.statistics.token_count > self.min_tokens)
        self._text.append(released)
        self.matched_stop = matched
        return matched is not None

    def due_in_ns(self) -> int | None:
        """Nanoseconds until `take` has a message: 0 now, None not before more comes from the engine."""
        pending = len(self._token_ids)
        if self.ended:
            return 0 if pending or any(self._text) else None
        if not pending or self.whole:
            return None
        if not self._last_sent_ns or pending >= self.coalesce_tokens or self.matched_stop is not None:
            return 0
        return max(0, self._last_sent_ns + self.coalesce_ns - self.clock())

    def take(self) -> Piece | None:
        """The message that is due now, None if none is."""
        if self.due_in_ns() != 0:
            return None
        text = "".join(self._text)
        if self._skip:
            self._skip, text = max(0, self._skip - len(text)), text[self._skip :]
        piece = Piece(text, self._token_ids, self._logprobs)
        self._text, self._token_ids, self._logprobs = [], [], []
        self._last_sent_ns = self.clock()
        self.statistics.first_sent_ns = self.statistics.first_sent_ns or self._last_sent_ns
        self.statistics.message_count += 1
        return piece
