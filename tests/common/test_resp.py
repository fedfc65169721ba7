"""RESP2: what is packed is what Redis reads; answers are the same however they are cut."""

from __future__ import annotations

import pytest
from redis.exceptions import InvalidResponse, ResponseError

from services.common.resp import Incomplete, packed, parsed

ANSWERS = {
    b"+OK\r\n": b"OK",
    b":-12\r\n": -12,
    b"$-1\r\n": None,
    b"$0\r\n\r\n": b"",
    b"$5\r\na\r\n:1\r\n": b"a\r\n:1",
    b"*-1\r\n": None,
    b"*0\r\n": [],
    b"*3\r\n:1\r\n*1\r\n$2\r\n\xff\x00\r\n+a\r\n": [1, [b"\xff\x00"], b"a"],
}


def test_a_command_is_an_array_of_strings():
    """Text as UTF-8, numbers in decimal, bytes as they are; lengths are of bytes."""
    assert (
        packed(("SET", "ü", b"\r\n", 7, 0.5))
        == b"*5\r\n$3\r\nSET\r\n$2\r\n\xc3\xbc\r\n$2\r\n\r\n\r\n$1\r\n7\r\n$3\r\n0.5\r\n"
    )


@pytest.mark.parametrize(("data", "answer"), ANSWERS.items())
def test_an_answer_is_read_when_it_is_whole(data, answer):
    """Not a byte earlier; where it ends is said, whatever surrounds it."""
    for end in range(len(data)):
        with pytest.raises(Incomplete):
            parsed(data[:end])
    assert parsed(data) == (answer, len(data))
    assert parsed(b"+x\r\n" + data + b":3\r\n", 4) == (answer, 4 + len(data))


def test_an_error_is_an_answer():
    """It is returned, so that what comes after it in the same bytes is read too."""
    error, end = parsed(b"-NOSCRIPT No matching script\r\n:1\r\n")
    assert isinstance(error, ResponseError)
    assert (str(error), end) == ("NOSCRIPT No matching script", 30)


@pytest.mark.parametrize("data", [b"HTTP/1.1 400 Bad Request\r\n", b":x\r\n", b"$\r\n", b"*1\r\n?\r\n", b"\r\n"])
def test_what_is_no_answer_is_refused(data):
    """At once, rather than waited for."""
    with pytest.raises(InvalidResponse):
        parsed(data)
