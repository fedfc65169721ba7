"""The fixed workloads, as token ids: every engine and every version does the same work.

Both are drawn from Python's `random.Random` with a pinned seed, so the ids are the same everywhere; a test pins the
hash. Ids lie in the vocabulary of SmolLM2 above its control tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY_SIZE = 49_152
FIRST_ID = 1_000
NAMES = ("w1", "w2")

W1_REQUESTS = 48
W1_SEED = 0
W2_CONVERSATIONS = 6
W2_TURNS = 4
W2_SEED = 1
W2_SYSTEM_TOKENS = 512
W2_USER_TOKENS = 48
W2_ASSISTANT_TOKENS = 64
W2_OUTPUT_TOKENS = 32


@dataclass(frozen=True)
class Item:
    """One request: generate exactly `output` tokens after `prompt`, greedily, whatever they are."""

    prompt: tuple[int, ...]
    output: int


Workload = list[list[Item]]  # chains: the items of one follow one another, the chains run side by side


def w1() -> Workload:
    """Offline: 48 unrelated requests; 70 % of 32-128 prompt tokens, 20 % of 256-512, 10 % of 1024-1536."""
    draw = random.Random(W1_SEED)  # noqa: S311 - repeatable on purpose
    chains: Workload = []
    for _ in range(W1_REQUESTS):
        share = draw.random()
        shortest, longest = (32, 128) if share < 0.7 else (256, 512) if share < 0.9 else (1024, 1536)
        length = draw.randint(shortest, longest)
        output = draw.randint(16, 96)
        chains.append([Item(random_ids(draw, length), output)])
    return chains


def w2() -> Workload:
    """Conversations: 6 of 4 turns on one 512-token system prompt; each turn sends the whole history."""
    draw = random.Random(W2_SEED)  # noqa: S311
    system = random_ids(draw, W2_SYSTEM_TOKENS)
    chains: Workload = []
    for _ in range(W2_CONVERSATIONS):
        history, turns = system, []
        for _ in range(W2_TURNS):
            history += random_ids(draw, W2_USER_TOKENS)
            turns.append(Item(history, W2_OUTPUT_TOKENS))
            history += random_ids(draw, W2_ASSISTANT_TOKENS)
        chains.append(turns)
    return chains


def get(name: str) -> Workload:
    """The workload of a name of `NAMES`. Raises KeyError."""
    return {"w1": w1, "w2": w2}[name]()


def counts(workload: Workload) -> tuple[int, int, int]:
    """(requests, prompt tokens, output tokens)."""
    items = [item for chain in workload for item in chain]
    return len(items), sum(len(item.prompt) for item in items), sum(item.output for item in items)


def random_ids(draw: random.Random, count: int) -> tuple[int, ...]:
    """So many token ids, none of them a control token."""
    return tuple(draw.randint(FIRST_ID, VOCABULARY_SIZE - 1) for _ in range(count))
