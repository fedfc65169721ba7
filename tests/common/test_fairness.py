"""Who is next: whoever was given least for its weight, and nobody saves up."""

from __future__ import annotations

from collections import Counter

from services.common import fairness
from services.common.fairness import FairClock


def served(fair: FairClock[str], weights: dict[str, float], tokens: int, turns: int) -> Counter[str]:
    """Turns that each of some keys is given, all of them always wanting one."""
    count: Counter[str] = Counter()
    for _ in range(turns):
        key = min(weights, key=fair.at)
        fair.turn(key)
        fair.give(key, tokens, weights[key])
        count[key] += 1
    return count


def test_tokens_are_shared_by_weight():
    """To within one turn, whatever came before."""
    fair: FairClock[str] = FairClock()
    assert served(fair, {"a": 1, "b": 1}, 70, 100) == {"a": 50, "b": 50}
    assert served(fair, {"a": 3, "b": 1, "c": 1}, 50, 100)["a"] in (59, 60, 61)


def test_being_away_saves_nothing_up():
    """Who comes back is level with the one who is next, and is not owed the past."""
    fair: FairClock[str] = FairClock()
    served(fair, {"a": 1}, 10, 1000)
    assert served(fair, {"a": 1, "b": 1}, 10, 20)["a"] >= 9


def test_what_is_given_back_counts():
    """A request that was expected to cost more than it did leaves its key further back."""
    fair: FairClock[str] = FairClock()
    for key in ("a", "b"):
        fair.turn(key)
        fair.give(key, 1000, 1)
    fair.give("b", -900, 1)
    assert fair.at("b") == 100
    assert served(fair, {"a": 1, "b": 1}, 100, 9) == {"b": 9}


def test_keys_that_say_nothing_are_forgotten():
    """However many come, only those are kept that are ahead."""
    fair: FairClock[int] = FairClock()
    for turn in range(6 * fairness.KEYS_TO_TIDY):
        fair.turn(turn // 2)
        fair.give(turn // 2, 1, 1)
    assert len(fair._clocks) <= fairness.KEYS_TO_TIDY
