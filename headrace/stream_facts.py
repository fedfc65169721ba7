"""What a stream says of itself, the same for callers with asyncio and without. Knows no connection."""

from __future__ import annotations

from typing import Protocol

from headrace.answers import Answer, Collector


class SourceFacts(Protocol):
    """What every source of messages knows."""

    stream_id: str
    last_sequence_number: int
    resume_count: int


class StreamFacts:
    """The part of a stream that does not wait. Args: facts: of its source."""

    def __init__(self, facts: SourceFacts) -> None:
        self._facts = facts
        self._collector = Collector()
        self._closed = False

    @property
    def answer(self) -> Answer:
        """The whole answer, once the stream has ended. Its text is that of the deltas that came out of this object.

        Raises:
            RuntimeError: it has not.
        """
        if self._collector.answer is None:
            raise RuntimeError("the stream has not ended; iterate over it first")
        return self._collector.answer

    @property
    def stream_id(self) -> str:
        """Names a resumable stream in `resume`, from the first delta on; "" otherwise."""
        return self._facts.stream_id

    @property
    def last_sequence_number(self) -> int:
        """Of the last message that came, -1: none."""
        return self._facts.last_sequence_number

    @property
    def resume_count(self) -> int:
        """How often the stream lost its connection and went on over another one."""
        return self._facts.resume_count
