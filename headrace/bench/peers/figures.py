"""What is measured of every engine, in terms of one thing that each of them can do: generate a list of items.

An engine is never told to forget. Each measurement has prompts of its own instead, of the same lengths, so that no
prefix cache knows them. Knows no engine.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.bench import workloads
from headrace.bench.workloads import FIRST_ID, VOCABULARY_SIZE, Item

WARM_UP_ITEMS = 8
_STRIDE = 7  # ids are moved by a multiple of it
_PROMPT_SEED = 2


@dataclass(frozen=True)
class Generated:
    """What generating a list of items took."""

    seconds: float
    tokens: int  # that came out; fewer than asked for only where an engine cannot be told exactly
    first_token_s: Sequence[float] = ()  # of each item, where the engine tells


Generate = Callable[[Sequence[Item]], Generated]  # every item at once, greedily, to its full length
Values = dict[str, float]


@dataclass(frozen=True)
class Value:
    """One number of a figure."""

    title: str
    unit: str
    more_is_better: bool = False


VALUES = {
    "w1": Value("W1, output", "tok/s", more_is_better=True),
    "w1-first-token": Value("W1, first token, median", "s"),
    "one-stream": Value("one stream, a token", "ms"),
    "prompt": Value("1024-token prompt, cold", "ms"),
    "prompt-again": Value("1024-token prompt, again", "ms"),
    "w2": Value("W2, cache kept", "s"),
    "decode-32": Value("decode, 32 streams", "tok/s", more_is_better=True),
    "attention-3": Value("attention of a layer, 8 x 4,096, 3 heads a key", "ms"),
    "attention-7": Value("attention of a layer, 8 x 4,096, 7 heads a key", "ms"),
}
ATTENTION = {"attention-3": (3, 3), "attention-7": (7, 2)}  # queries a key/value head, key/value heads
ATTENDED = {"sequences": 8, "context": 4096}


def w1(generate: Generate, number: int) -> Values:
    """The 48 requests of W1 at once."""
    done = generate(_moved([chain[0] for chain in workloads.w1()], number))
    values = {"w1": done.tokens / done.seconds}
    if done.first_token_s:
        values["w1-first-token"] = statistics.median(done.first_token_s)
    return values


def w2(generate: Generate, number: int) -> Values:
    """The conversations of W2, a turn of all of them at a time; the cache keeps what it can."""
    chains = [_moved(chain, number) for chain in workloads.w2()]
    return {"w2": sum(generate(turn).seconds for turn in map(list, zip(*chains, strict=True)))}


def one_stream(generate: Generate, number: int) -> Values:
    """Milliseconds a token of one answer of 128 tokens after 64."""
    seconds = _decode(generate, number, streams=1, prompt=64, output=128)
    return {"one-stream": seconds / 128 * 1e3}


def decode_32(generate: Generate, number: int) -> Values:
    """Tokens a second of 32 answers of 64 tokens after 128, their prompts not counted."""
    return {"decode-32": 32 * 64 / _decode(generate, number, streams=32, prompt=128, output=64)}


def prompt(generate: Generate, number: int) -> Values:
    """Milliseconds to one token after 1,024, and the same again at once."""
    items = _drawn(1, 1024, number, output=1)
    return {"prompt": generate(items).seconds * 1e3, "prompt-again": generate(items).seconds * 1e3}


FIGURES: dict[str, Callable[[Generate, int], Values]] = {
    "w1": w1,
    "one-stream": one_stream,
    "prompt": prompt,
    "w2": w2,
    "decode-32": decode_32,
}


def warm_up(generate: Generate) -> None:
    """A little of everything, so that nothing that happens once is measured."""
    generate(_moved([chain[0] for chain in workloads.w1()][:WARM_UP_ITEMS], 1))


def _decode(generate: Generate, number: int, *, streams: int, prompt: int, output: int) -> float:
    """Seconds of decoding alone: prompts are computed first, and then taken from the cache by both passes."""
    items = _drawn(streams, prompt, number, output=1)
    generate(items)
    first = generate(items).seconds
    return generate([Item(item.prompt, output + 1) for item in items]).seconds - first


def _moved(items: Sequence[Item], number: int) -> list[Item]:
    """The same lengths and the same shared prefixes with other ids; `number` says which."""
    room = VOCABULARY_SIZE - FIRST_ID
    return [
        Item(tuple((token_id - FIRST_ID + _STRIDE * number) % room + FIRST_ID for token_id in item.prompt), item.output)
        for item in items
    ]


def _drawn(count: int, length: int, number: int, output: int) -> list[Item]:
    draw = random.Random(f"{_PROMPT_SEED} {number} {count} {length}")  # noqa: S311 - repeatable on purpose
    return [Item(workloads.random_ids(draw, length), output) for _ in range(count)]
