"""RESP2, the protocol of Redis: commands to bytes, bytes to answers. Knows no connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import InvalidResponse, ResponseError

Word = str | bytes | int | float
_END = b"\r\n"


class Incomplete(Exception):
    """More bytes are needed."""


def packed(words: Sequence[Word]) -> bytes:
    """A command: an array of strings with their lengths."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def parsed(data: bytes, at: int = 0) -> tuple[Any, int]:
    """The answer that begins at `at`, and where it ends.

    Returns:
        Strings are bytes; an error is a `ResponseError`, returned, not raised.

    Raises:
        Incomplete: the answer is not whole yet.
        InvalidResponse: this is no answer of Redis.
    """
    end = data.find(_END, at)
    if end < 0:
        raise Incomplete
    kind, head, after = data[at : at + 1], data[at + 1 : end], end + len(_END)
    if kind == b"+":
        return head, after
    if kind == b"-":
        return ResponseError(head.decode(errors="replace")), after
    try:
        number = int(head)
    except ValueError:
        raise InvalidResponse(f"{data[at:end][:40]!r}") from None
    if kind == b":":
        return number, after
    if kind == b"$":
        return _string(data, after, number)
    if kind == b"*":
        return _array(data, after, number)
    raise InvalidResponse(f"{data[at:end][:40]!r}")


def _string(data: bytes, at: int, length: int) -> tuple[bytes | None, int]:
    if length < 0:
        return None, at
    if len(data) < at + length + len(_END):
        raise Incomplete
    return data[at : at + length], at + length + len(_END)


def _array(data: bytes, at: int, length: int) -> tuple[list[Any] | None, int]:
    if length < 0:
        return None, at
    items = []
    for _ in range(length):
        item, at = parsed(data, at)
        items.append(item)
    return items, at
