"""Finds stop strings in text that arrives in pieces.

Pure text: knows neither tokens nor who reads. The answer never depends on how the text was cut into pieces.
"""

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """The stop strings of a request as one automaton, so that each character is looked at once.

    Aho and Corasick, "Efficient string matching: an aid to bibliographic search", CACM 18 (1975). A state is
    the longest suffix of the text so far that is a prefix of some stop string; state 0 is the empty one.
    Immutable once built: the n answers of a request share it. Building costs one step a character of all
    stop strings together.

    Raises:
        ValueError: a stop string is empty.
    """

    __slots__ = ("_fail", "_next", "first_characters", "held", "match", "stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string is empty; expected at least one character")
        self.stops = tuple(dict.fromkeys(stops))
        self._next: list[dict[str, int]] = [{}]  # state → character → longer state
        self._fail = [0]  # state → the state of its longest proper suffix
        self.match: list[str | None] = [None]  # state → longest stop string that the text now ends with
        self.held = [0]  # state → characters to hold back: the longest suffix that a stop string continues
        depth = [0]
        for stop in self.stops:
            state = 0
            for character in stop:
                if character not in self._next[state]:
                    self._next[state][character] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self.match.append(None)
                    self.held.append(0)
                    depth.append(depth[state] + 1)
                state = self._next[state][character]
            self.match[state] = stop
        self.first_characters = frozenset(self._next[0])
        self._link(depth)

    def step(self, state: int, character: str) -> int:
        """Return the state after one more character."""
        while character not in self._next[state]:
            if state == 0:
                return 0
            state = self._fail[state]
        return self._next[state][character]

    def _link(self, depth: list[int]) -> None:
        """Fill fail, match and held, shorter states first: each looks at a shorter one only."""
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for character, longer in self._next[state].items():
                self._fail[longer] = self.step(self._fail[state], character) if state else 0
                waiting.append(longer)
            if state:
                shorter = self._fail[state]
                self.match[state] = self.match[state] or self.match[shorter]
                self.held[state] = depth[state] if self._next[state] else self.held[shorter]


class StopMatcher:
    """One answer's text on its way out, cut at the first stop string.

    The match that is complete first wins; of those complete at the same character, the one that starts
    first (the longest). Held back is only the longest end of the text that is a proper prefix of some stop
    string, so no character of a stop string is ever let through, unless `include_stop` asks for all of it.
    """

    __slots__ = ("_automaton", "_held", "_include_stop", "_state", "matched")

    def __init__(self, stops: Sequence[str] | StopAutomaton, include_stop: bool = False) -> None:
        self._automaton = stops if isinstance(stops, StopAutomaton) else StopAutomaton(stops)
        self._include_stop = include_stop
        self._held = ""
        self._state = 0
        self.matched: str | None = None

    def push(self, text: str, armed: bool = True) -> tuple[str, str | None]:
        """Take more text; return (text that can go out, the stop string that ended the answer or None).

        With `armed` false, stop strings that would be complete inside this text are ignored (the first
        min_tokens tokens); one that only begins in it still counts when later, armed text completes it.
        After a match every push returns ("", the same match).
        """
        if self.matched is not None:
            return "", self.matched
        automaton = self._automaton
        if self._state == 0 and automaton.first_characters.isdisjoint(text):
            return text, None
        state = self._state
        for position, character in enumerate(text):
            state = automaton.step(state, character)
            match = automaton.match[state]
            if match is not None and armed:
                self.matched = match
                whole = self._held + text[: position + 1]
                self._held = ""
                return whole if self._include_stop else whole[: len(whole) - len(match)], match
        self._state = state
        whole = self._held + text
        kept = len(whole) - automaton.held[state]
        self._held = whole[kept:]
        return whole[:kept], None

    def finish(self) -> str:
        """Return what was held back: no stop string came. Empty after a match; call once, at the end."""
        held, self._held = self._held, ""
        return held
