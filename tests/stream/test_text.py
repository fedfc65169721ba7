"""Real tokenizer, every size of message, every split: deltas are the unary text, and `decode` cut at the stop."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer

from services.stream.detokenizer import DetokenizerFactory
from services.stream.relay import Relay
from services.stream.stops import StopMatcher

# Fire, smile, two Chinese characters, e + combining acute, DEFGHIJ, and half characters in the middle.
SCRIPT = [33, 10813, 238, 115, 10813, 38887, 18645, 250, 48392, 138, 85, 151, 219, 33203, 23960, 57, 58, 10813, 238, 44]
STOPS = ["DEFGHIJ", "HIJ\nUser:", "\N{FIRE}", "e\u0301DE", "\ufffd", "never", "J"]


@pytest.fixture(scope="module")
def tokenizer(default_model_dir):
    return Tokenizer.from_file(str(default_model_dir / "tokenizer.json"))


@pytest.fixture(scope="module")
def detokenizers(default_model_dir):
    return DetokenizerFactory.load(default_model_dir)


def run(detokenizers, chunks, *, stops=(), coalesce=4, whole=False, include=False):
    """Text and ids of every message, and the stop that matched."""
    relay = Relay(
        detokenizers.new(), StopMatcher(list(stops), include_stop=include), coalesce_tokens=coalesce, whole=whole
    )
    pieces = []
    for chunk in chunks:
        relay.push(chunk)
        while (piece := relay.take()) is not None:
            pieces.append(piece)
    relay.end()
    while (piece := relay.take()) is not None:
        pieces.append(piece)
    return pieces, relay.matched_stop


def cut(text, stops, include):
    """The reference: the stop that is complete first wins; of two completed by one character, the longer."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            stop = max(done, key=len)
            return text[:end] if include else text[: end - len(stop)], stop
    return text, None


@pytest.mark.parametrize("coalesce", range(1, 9))
@pytest.mark.parametrize("include", [False, True])
def test_every_split_and_every_stop(tokenizer, detokenizers, coalesce, include):
    """Each pair of stops, each place to split the ids in two: the cut text, and no character of a stop before it."""
    text = tokenizer.decode(SCRIPT)
    for first in STOPS:
        for second in STOPS:
            wanted, stop = cut(text, [first, second], include)
            for split in range(len(SCRIPT)):
                chunks = [SCRIPT[:split], *([token] for token in SCRIPT[split:])]
                pieces, matched = run(detokenizers, chunks, stops=[first, second], coalesce=coalesce, include=include)
                got = "".join(piece.text for piece in pieces)
                assert (got, matched) == (wanted, stop), (first, second, split)


@pytest.mark.parametrize("coalesce", [1, 4, 8])
def test_random_ids_three_ways(tokenizer, detokenizers, coalesce):
    """200 seeds of ids full of half characters: streamed == whole == decode; U+FFFD only where decode has it."""
    for seed in range(200):
        choice = random.Random(seed)
        ids = [choice.randrange(17, 49152) if choice.random() < 0.5 else choice.randrange(17, 400) for _ in range(64)]
        streamed, _ = run(detokenizers, [[token] for token in ids], coalesce=coalesce)
        whole, _ = run(detokenizers, [ids], whole=True)
        wanted = tokenizer.decode(ids)
        assert "".join(piece.text for piece in streamed) == "".join(piece.text for piece in whole) == wanted
        assert [token for piece in streamed for token in piece.token_ids] == ids
        assert sum(piece.text.count("\ufffd") for piece in streamed) == wanted.count("\ufffd")


def test_bytes_that_never_become_a_character_cost_the_same_each(detokenizers):
    """1,000 times the same first byte of a character: each is released by the next token, none waits for ever."""
    relay = Relay(detokenizers.new(), StopMatcher([]), coalesce_tokens=1)
    released = []
    for _ in range(1000):
        relay.push([10813])
        piece = relay.take()
        released.append(len(piece.text))
    assert max(released) <= 4
    assert sum(released) >= 998
