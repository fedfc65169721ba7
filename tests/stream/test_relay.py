"""A relay loses nothing, sends the first token at once, and never waits for text that credits depend on."""

from __future__ import annotations

from itertools import pairwise

import pytest

from services.stream.relay import Relay
from services.stream.stops import StopMatcher

MS = 1_000_000


class Letters:
    """Token i is the i-th letter; token 0 is half a character that the next token completes as 'é'."""

    def __init__(self):
        self._half = False

    def push(self, token_ids):
        text = ""
        for token in token_ids:
            if token == 0:
                self._half = True
            else:
                text += ("é" if self._half else "") + chr(ord("a") + token - 1)
                self._half = False
        return text

    def finish(self):
        return "\ufffd" if self._half else ""


class Clock:
    """Virtual nanoseconds."""

    def __init__(self):
        self.now = 10**12

    def __call__(self):
        return self.now


def relay(*stops, **options):
    clock = Clock()
    made = Relay(Letters(), StopMatcher(list(stops)), clock=clock, **options)
    return made, clock


def tokens(text):
    return [ord(letter) - ord("a") + 1 for letter in text]


def drain(made):
    pieces = []
    while (piece := made.take()) is not None:
        pieces.append(piece)
    return pieces


def test_the_first_token_leaves_at_once():
    """TTFT with coalescing is TTFT without."""
    made, _ = relay(coalesce_tokens=8)
    assert made.due_in_ns() is None
    made.push(tokens("a"))
    assert [piece.text for piece in drain(made)] == ["a"]


def test_later_tokens_leave_when_full_or_when_the_time_is_up():
    """4 tokens, or 40 ms after the last message, whichever comes first."""
    made, clock = relay()
    made.push(tokens("a"))
    drain(made)
    made.push(tokens("bcd"))
    assert made.take() is None
    assert made.due_in_ns() == 40 * MS
    made.push(tokens("e"))
    assert made.take().text == "bcde"
    made.push(tokens("f"))
    clock.now += 39 * MS
    assert made.take() is None
    clock.now += 1 * MS
    assert made.take().text == "f"


@pytest.mark.parametrize("coalesce", range(1, 9))
@pytest.mark.parametrize("length", range(1, 18))
def test_nothing_is_lost_at_the_end(length, coalesce):
    """Tokens over all messages sum to those pushed, text to the whole, for every length and size of message."""
    made, _ = relay(coalesce_tokens=coalesce)
    text, pieces = "abcdefghijklmnopq"[:length], []
    for letter in text:
        made.push(tokens(letter))
        pieces += drain(made)
    made.end()
    pieces += drain(made)
    assert "".join(piece.text for piece in pieces) == text
    assert [token for piece in pieces for token in piece.token_ids] == tokens(text)
    assert made.take() is None
    assert made.due_in_ns() is None


def test_a_lone_ending_token_is_counted_and_its_text_not_sent():
    """EOS makes no text, and its message still accounts for it."""
    made, _ = relay()
    made.push(tokens("ab"), ending_token=True)
    made.end()
    (piece,) = drain(made)
    assert (piece.text, piece.token_ids) == ("a", tokens("ab"))


def test_held_text_does_not_hold_its_tokens():
    """A held stop prefix or half a character: the message leaves without text, so that credits come back."""
    made, clock = relay("bcdefgh")
    made.push(tokens("a"))
    drain(made)
    made.push(tokens("bcde"))
    (piece,) = drain(made)
    assert (piece.text, len(piece.token_ids)) == ("", 4)
    made.push([0])
    clock.now += 40 * MS
    (piece,) = drain(made)
    assert (piece.text, piece.token_ids) == ("", [0])
    made.push(tokens("x"))
    made.end()
    assert "".join(piece.text for piece in drain(made)) == "bcdeéx"


def test_held_text_is_released_at_the_end():
    """The beginning of a stop string, and half a character, both come out when the answer ends."""
    made, _ = relay("bcd")
    made.push(tokens("abc"))
    made.push([0])
    made.end()
    assert "".join(piece.text for piece in drain(made)) == "abc\ufffd"


@pytest.mark.parametrize("coalesce", range(1, 9))
@pytest.mark.parametrize("split", range(1, 8))
def test_a_stop_string_never_shows_whatever_the_split(split, coalesce):
    """Text up to the stop, no letter of it, the engine told once, tokens counted up to the one that completed it."""
    made, _ = relay("def", coalesce_tokens=coalesce)
    word, told, pieces = "abcdefgh", [], []
    for start, end in pairwise([0, split, len(word)]):
        told.append(made.push(tokens(word[start:end])))
        pieces += drain(made)
    made.end()
    pieces += drain(made)
    assert "".join(piece.text for piece in pieces) == "abc"
    assert made.matched_stop == "def"
    assert told.count(True) == 1
    assert sum(len(piece.token_ids) for piece in pieces) == made.statistics.token_count == 6


def test_a_stop_string_does_not_count_before_min_tokens():
    """Complete within the first min_tokens tokens: ignored; the next one counts."""
    made, _ = relay("b", min_tokens=2)
    made.push(tokens("abcb"))
    made.end()
    assert "".join(piece.text for piece in drain(made)) == "abc"
    assert made.statistics.token_count == 4


def test_a_whole_answer_is_one_message():
    """Nothing before the end, then everything."""
    made, clock = relay(whole=True)
    for letter in "abcdefgh":
        made.push(tokens(letter))
        clock.now += 100 * MS
        assert made.due_in_ns() is None
    made.end()
    (piece,) = drain(made)
    assert (piece.text, len(piece.token_ids)) == ("abcdefgh", 8)


def test_the_end_is_idempotent():
    """An ending that comes twice changes nothing."""
    made, _ = relay()
    made.push(tokens("a"))
    made.end()
    made.end()
    assert [piece.text for piece in drain(made)] == ["a"]
