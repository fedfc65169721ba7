"""Stop strings: the text let through never depends on how it arrived, and equals a plain reference."""

import itertools
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.stream.stops import StopAutomaton, StopMatcher


def reference(text: str, stops: Sequence[str], include_stop: bool = False) -> tuple[str, str | None]:
    """Cut at the match that ends first and, of those, starts first."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include_stop else end - len(stop)], stop


def run(pieces: Iterable[str], stops: Sequence[str], include_stop: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_stop)
    let_through = "".join(matcher.push(piece)[0] for piece in pieces)
    return let_through + matcher.finish(), matcher.matched


def splits(text: str) -> Iterable[tuple[str, ...]]:
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            yield text[:first], text[first:second], text[second:]


CASES = [
    ("say DEFGHIJ and more", ["DEFGHIJ"]),
    ("hello\nUser: x", ["\nUser:"]),
    ("UNO DUE TRE", ["TRE\nAAAA"]),
    ("why?\nbecause", ["\n"]),
    ("xabcdy", ["abcd", "bc"]),
    ("xabcdy", ["cd", "abcd", "d"]),
    ("aaab", ["aab"]),
    ("ababac", ["abac", "ababd"]),
    ("no stop here", ["stopper", "zzz"]),
    ("🔥e\u0301🔥\U0001f642", ["\u0301🔥"]),
    ("<|im_end|>", ["<|im_end|>"]),
    ("plain", []),
]


@pytest.mark.parametrize(("text", "stops"), CASES)
@pytest.mark.parametrize("include_stop", [False, True])
def test_every_split_gives_the_reference(text: str, stops: list[str], include_stop: bool) -> None:
    expected = reference(text, stops, include_stop)
    for pieces in splits(text):
        assert run(pieces, stops, include_stop) == expected
    assert run(text, stops, include_stop) == expected  # one character at a time


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=5),
    cuts=st.lists(st.integers(0, 30), max_size=5),
    include_stop=st.booleans(),
)
def test_any_text_any_stops_any_split(text: str, stops: list[str], cuts: list[int], include_stop: bool) -> None:
    places = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert run(pieces, stops, include_stop) == reference(text, stops, include_stop)


@given(
    text=st.text(alphabet="abc", max_size=30),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=5),
)
def test_held_back_is_exactly_the_longest_proper_prefix_of_a_stop(text: str, stops: list[str]) -> None:
    """Never a character more than that, or text would be late for nothing."""
    matcher = StopMatcher(stops)
    let_through = ""
    for position, character in enumerate(text):
        let_through += matcher.push(character)[0]
        if matcher.matched is not None:
            return
        seen = text[: position + 1]
        prefixes = [stop[:size] for stop in stops for size in range(len(stop))]
        assert len(seen) - len(let_through) == max(len(prefix) for prefix in prefixes if seen.endswith(prefix))


def test_after_a_match_nothing_more_goes_out() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("a END b") == ("a ", "END")
    assert matcher.push("more END") == ("", "END")
    assert matcher.finish() == ""


def test_a_held_tail_is_released_at_the_end_once() -> None:
    matcher = StopMatcher(["TRE\nAAAA"])
    assert matcher.push("UNO DUE TRE") == ("UNO DUE ", None)
    assert matcher.finish() == "TRE"
    assert matcher.finish() == ""


def test_an_unarmed_match_is_ignored_and_its_text_goes_out() -> None:
    """Stop strings inside the first min_tokens tokens are ordinary text."""
    matcher = StopMatcher(["END"])
    assert matcher.push("one END two ", armed=False) == ("one END two ", None)
    assert matcher.push("three END") == ("three ", "END")


def test_a_stop_that_begins_unarmed_and_ends_armed_counts() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("x EN", armed=False) == ("x ", None)
    assert matcher.push("D y") == ("", "END")


def test_an_ignored_stop_can_begin_a_longer_one() -> None:
    matcher = StopMatcher(["ab", "abcd"])
    assert matcher.push("ab", armed=False) == ("", None)
    assert matcher.push("cd") == ("", "abcd")


def test_an_ignored_stop_is_not_held_when_nothing_continues_it() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("ab", armed=False) == ("ab", None)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopAutomaton(["a", ""])


def test_answers_share_one_automaton() -> None:
    automaton = StopAutomaton(["x", "x"])
    first, second = StopMatcher(automaton), StopMatcher(automaton)
    assert first.push("ax") == ("a", "x")
    assert second.push("b") == ("b", None)
    assert automaton.stops == ("x",)


def test_each_character_costs_a_bounded_number_of_steps() -> None:
    """A long stop that almost matches everywhere is the worst case; counted, not timed."""

    class Counting(StopAutomaton):
        def step(self, state: int, character: str) -> int:
            nonlocal visited
            before = state
            after = super().step(state, character)
            visited += 1 + max(0, before - after)  # states of one single stop are numbered by depth
            return after

    visited = 0
    automaton = Counting(["a" * 999 + "b", "a" * 1000])
    visited = 0
    matcher = StopMatcher(automaton)
    text = "a" * 999 + "c"
    for _ in range(20):
        matcher.push(text)
    assert matcher.finish() == ""
    assert visited <= 3 * 20 * len(text)
