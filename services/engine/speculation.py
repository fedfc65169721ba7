"""Guesses what a request will say next, from what its prompt and its answer have said: speculative decoding by lookup.

Knows token ids and counts; nothing of blocks, tensors or clocks. Where the last few tokens stood before, what followed
them then is the guess. Guesses are computed behind the last known token in the same step, and a guess counts only where
it is the very token that is chosen there: a choice depends on seed, position and what is known alone, so no answer
changes, greedy or drawn. (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023; guesses
by lookup: Yang et al., "Inference with Reference", 2023.)

A guess costs a row of a step whether it is right or not. How often a request's guesses are right is followed for each
request, also while none are computed, and only those are computed that make the step give more tokens in its time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.engine.request import Request

MATCHED_TOKENS = 3
"""Tokens that must have stood together before."""

FIXED_ROWS = 8
"""A step of n rows takes as long as n + FIXED_ROWS rows of a large step: what it costs to read the weights."""

_BITS = 21  # of a token id in a key: three ids are one int64
_FIRST_ACCEPTANCE = 0.6
_MOST_ACCEPTANCE = 0.98
_WEIGHT = 0.15  # of the latest guess in the share of those that were right

NO_DRAFT: NDArray[np.int32] = np.empty(0, dtype=np.int32)


class Lookup:
    """One request's places of every few tokens, and how its guesses do.

    Attributes:
        acceptance: share of guesses that were right, of those whose forerunners were; recent ones weigh most.
    """

    __slots__ = ("_guess", "_guessed_at", "_indexed_count", "_places", "acceptance")

    def __init__(self) -> None:
        self.acceptance = _FIRST_ACCEPTANCE
        self._places: dict[int, int] = {}  # by the tokens before it; of several the latest
        self._indexed_count = 0
        self._guess: list[int] = []
        self._guessed_at = 0

    def guess(self, tokens: NDArray[np.int32], count: int) -> NDArray[np.int32]:
        """At most ``count`` tokens that may follow; none where the last few never stood before.

        A guess that reaches the end of what is known goes on with itself, as a loop would.
        """
        self._index(tokens)
        size = tokens.size
        place = self._places.get(_key(tokens[-MATCHED_TOKENS:].tolist())) if size >= MATCHED_TOKENS else None
        if place is None:
            guess = NO_DRAFT
        elif place + count <= size:
            guess = tokens[place : place + count]
        else:
            guess = np.resize(tokens[place:], count)
        self._guess, self._guessed_at = guess.tolist(), size
        return guess

    def learn(self, tokens: NDArray[np.int32]) -> None:
        """Compare the last guess with what came instead."""
        for guessed, came in zip(self._guess, tokens[self._guessed_at :].tolist(), strict=False):
            right = guessed == came
            self.acceptance += _WEIGHT * (right - self.acceptance)
            if not right:
                break
        self.acceptance = min(self.acceptance, _MOST_ACCEPTANCE)
        self._guess = []

    def _index(self, tokens: NDArray[np.int32]) -> None:
        """Note the place after each few tokens that something follows."""
        first, last = max(self._indexed_count, MATCHED_TOKENS), tokens.size
        if last - first > 8:
            wide = tokens[first - MATCHED_TOKENS : last - 1].astype(np.int64)
            keys = (wide[:-2] << 2 * _BITS) | (wide[1:-1] << _BITS) | wide[2:]
            self._places.update(zip(keys.tolist(), range(first, last), strict=True))
        else:
            recent = tokens[first - MATCHED_TOKENS :].tolist()
            for offset, place in enumerate(range(first, last)):
                self._places[_key(recent[offset : offset + MATCHED_TOKENS])] = place
        self._indexed_count = max(first, last)


def _key(few: list[int]) -> int:
    first, second, third = few
    return first << 2 * _BITS | second << _BITS | third


class Speculation:
    """Drafts for the requests of a step: the guesses that are worth their rows."""

    def __init__(self, most: int) -> None:
        """Draft at most ``most`` tokens a request and step; 0: none ever."""
        self._most = most

    def drafts(self, requests: Sequence[Request], counts: Sequence[int], left: int) -> list[NDArray[np.int32]]:
        """Guesses to compute after each request's tokens of a step, often none.

        A step of n rows that gives e tokens gives them at a rate of e / (n + FIXED_ROWS). One row more is worth it
        where the chance that its guess is right is higher than that.

        Args:
            requests: of the step.
            counts: pending tokens that the step computes of each.
            left: rows that the step may still have.
        """
        drafts = [NO_DRAFT] * len(requests)
        if not self._most:
            return drafts
        chosen_count = sum(r.pending_count == count for r, count in zip(requests, counts, strict=True))
        least = chosen_count / (sum(counts) + FIXED_ROWS)
        for index, request in enumerate(requests):
            if request.pending_count == 1:
                draft = self._draft(request, least)[:left]
                drafts[index] = draft
                left -= draft.size
        return drafts

    def _draft(self, request: Request, least: float) -> NDArray[np.int32]:
        """A guess no longer than it pays, and than the request may go on in one step."""
        most = min(self._most, request.most_new_tokens - 1)
        if most < 1:
            return NO_DRAFT
        lookup = request.lookup
        if lookup is None:
            lookup = request.lookup = Lookup()
        tokens = request.tokens.view
        lookup.learn(tokens)
        worth = int(math.log(least) / math.log(lookup.acceptance)) if lookup.acceptance > least else 0
        guess = lookup.guess(tokens, max(1, min(most, worth)))  # one at least, to see whether it would be right
        return guess if worth else NO_DRAFT
