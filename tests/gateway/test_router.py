"""Where a request goes: to who has its prefix, unless that one has too much to do; away from who fails."""

from __future__ import annotations

import random
from collections import OrderedDict
from contextlib import ExitStack
from itertools import takewhile

import pytest

from headrace import errors
from headrace.v1 import engine_pb2
from services.gateway.affinity import PrefixIndex
from services.gateway.router import Chosen, Router


class Now:
    """Seconds that only the test moves."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def router(count: int = 2, blocks: int = 1000) -> tuple[Router, Now]:
    now = Now()
    made = Router(tuple(f"e{number}" for number in range(count)), now, lambda: 1.0)
    for engine in made.engines.values():
        engine.serving = True
        engine.facts = engine_pb2.GetEngineResponse(model="m", memory={"kv_block_count": blocks})
    return made, now


def send(made: Router, prompt: list[int], salt: bytes = b"", tried=()) -> tuple[str, int]:
    names = made.index.names(salt, prompt)
    with made.choose("m", names, len(prompt), tried) as chosen:
        return chosen.address, chosen.predicted_cached


def prompt(start: int, length: int = 320) -> list[int]:
    return list(range(start, start + length))


def test_a_prefix_goes_where_it_was_sent():
    """Requests that begin alike meet; those that do not are spread."""
    made, _ = router()
    homes = {start: send(made, prompt(start))[0] for start in (0, 1000, 2000, 3000)}
    assert sorted(homes.values()) == ["e0", "e0", "e1", "e1"]
    for start, home in homes.items():
        assert send(made, [*prompt(start), 7, 8, 9]) == (home, 320)


def test_another_salt_is_another_prefix():
    """Tenants' caches are apart in the engines, and so they are here."""
    made, _ = router()
    send(made, prompt(0), b"a")
    assert send(made, prompt(0), b"b")[1] == 0


def test_a_hit_is_given_up_for_an_idle_engine():
    """Once waiting would cost more than computing it again."""
    made, _ = router()
    home, _ = send(made, prompt(0))
    with ExitStack() as stack:
        for number in range(9):
            chosen = stack.enter_context(made.choose("m", made.index.names(b"", prompt(0)), 320))
            assert chosen.address == home, number
        loaded = [send(made, prompt(0))[0] for _ in range(1)]
        made.engines[home].open_count += 5
        assert send(made, prompt(0))[0] != home
        assert loaded


def test_what_an_engine_has_forgotten_is_forgotten():
    """As many blocks as its cache holds, least recently used first; and all of it when it was lost."""
    made, _ = router(1, blocks=40)
    for start in (0, 1000, 2000):
        send(made, prompt(start))
    assert send(made, prompt(0))[1] == 0
    assert send(made, prompt(0))[1] == 320
    made.failed(made.engines["e0"])
    assert made.index.predict("e0", made.index.names(b"", prompt(0))) == 0


class Cache:
    """What an engine really keeps: the least recently used blocks go first, tails before heads."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._blocks = capacity, OrderedDict[int, None]()

    def cached_tokens(self, names: list[int]) -> int:
        found = list(takewhile(self._blocks.__contains__, names))
        for name in reversed(names):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return 16 * len(found)

    def flush(self) -> None:
        self._blocks.clear()


def test_answers_correct_what_is_believed():
    """An engine that keeps a quarter of what it seems to, and is emptied now and then: wrong guesses fall by half."""

    def wrong(*, corrected: bool) -> int:
        made, cache, draw, sum_ = router(1, blocks=1000)[0], Cache(250), random.Random(5), 0
        for turn in range(600):
            names = made.index.names(b"", prompt(1000 * min(int(draw.expovariate(0.1)), 49)))
            if turn % 150 == 149:
                cache.flush()
            with made.choose("m", names, 320) as chosen:
                found = cache.cached_tokens(names)
                sum_ += chosen.predicted_cached > found
                made.succeeded(chosen, found if corrected else None)
        return sum_

    assert wrong(corrected=True) < wrong(corrected=False) / 2


def test_what_was_used_later_stays_believed():
    """A miss says something of what was used before it, and nothing of what was used since."""
    made, _ = router(1)
    for start in (0, 1000, 2000):
        send(made, prompt(start))
    names = made.index.names(b"", prompt(1000))
    with made.choose("m", names, 320) as chosen:
        made.succeeded(chosen, 160)
    assert made.index.predict("e0", made.index.names(b"", prompt(0))) == 0
    assert made.index.predict("e0", made.index.names(b"", prompt(2000))) == 320
    assert made.index.predict("e0", names) == 320


def test_hits_over_two_engines_are_those_of_one():
    """Conversations that grow, over shared beginnings: at least 90 % of the hits that one engine would have."""

    def hits(count: int) -> int:
        made, draw, total = router(count)[0], random.Random(3), 0
        talks = [[*prompt(10_000 * (number % 4)), number] for number in range(40)]
        for _ in range(400):
            talk = draw.choice(talks)
            total += send(made, talk)[1]
            talk.extend(draw.choices(range(50_000), k=20))
        return total

    assert hits(2) >= 0.9 * hits(1)


def test_an_engine_that_fails_rests():
    """Longer each time, and not at all if there is no other; an answer makes it whole."""
    made, now = router()
    bad = made.engines["e0"]
    made.failed(bad)
    assert {send(made, prompt(1000 * number))[0] for number in range(10)} == {"e1"}
    now.s = 0.6
    assert "e0" in {send(made, prompt(1000 * number))[0] for number in range(10, 20)}
    for _ in range(10):
        made.failed(bad)
    assert bad.rests_until - now.s == 8.0
    made.engines["e1"].serving = False
    assert send(made, prompt(0))[0] == "e0"
    made.succeeded(Chosen(bad, 0), 0)
    assert bad.rests_until == 0


def test_an_engine_that_drains_or_was_tried_gets_nothing():
    """And when none is left, the refusal says so."""
    made, _ = router()
    made.engines["e0"].draining = True
    assert {send(made, prompt(1000 * number))[0] for number in range(4)} == {"e1"}
    assert made.others("e1", "m") == ["e0"]
    assert not made.can_serve("m", ["e1"])
    with pytest.raises(errors.Unavailable, match="no other engine"):
        send(made, prompt(0), tried=["e1"])


def test_names_are_those_of_whole_blocks():
    """A partial block has none; the same tokens after another beginning have another."""
    index = PrefixIndex(4)
    assert len(index.names(b"", [1] * 11)) == 2
    assert index.names(b"", [1, 2, 3, 4, 9, 9, 9, 9])[1] != index.names(b"", [5, 6, 7, 8, 9, 9, 9, 9])[1]
