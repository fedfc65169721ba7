"""What load a run makes, as data, and the requests that it means: the same ones for the same data, anywhere.

A conversation is drawn from the seed and its number alone, so every client process makes its own share, and none of
them waits for another. A request that stands alone is a conversation of one turn.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headrace.bench.load import arrivals, lengths, logs
from headrace.bench.load.lengths import BadLoad
from headrace.bench.workloads import FIRST_ID, VOCABULARY_SIZE

MOST_REQUESTS = 1_000_000  # of an open loop, whose requests are made before it begins
PRIORITIES = ("interactive", "standard", "batch")
_ARRIVALS, _PREFIXES, _CONVERSATIONS = range(3)  # streams of random numbers that do not touch each other


@dataclass(frozen=True)
class Leg:
    """A part of a run with one level of load."""

    level: float  # open loop: requests a second; closed loop: conversations at a time
    seconds: float | None = None  # how long it lasts; None: until `requests` are made
    requests: int | None = None  # conversations; None: until `seconds` are over


@dataclass(frozen=True)
class LoadSpec:
    """The load of a run. Everything that a caller decides about it; equal ones make equal requests.

    Raises:
        BadLoad: a value that cannot be; the message names its option.
    """

    loop: Literal["open", "closed"]
    legs: tuple[Leg, ...]
    seed: int = 0
    arrivals: str = "poisson"  # see `arrivals.SYNTAX`; open loop
    prompt: str = "128"  # see `lengths.SYNTAX`; tokens of a prompt, or of a turn, after the shared prefix
    output: str = "64"
    correlation: float = 0.0  # of prompt and output length, -1 to 1
    replay: str | None = None  # a log: it says when, and how long; the one leg then says how much of it
    replay_speed: float = 1.0
    shared_prefix: int = 0  # tokens that all conversations of a group start with
    prefix_groups: int = 1
    turns: int = 1  # of a conversation; each turn sends all that came before
    think_s: float = 0.0  # from an answer to the next turn
    cancel_share: float = 0.0  # of the requests that are cancelled on the way, after a random number of their tokens
    slow_share: float = 0.0  # of the requests whose reader pauses after each message
    slow_pause_s: float = 0.5
    priorities: Mapping[str, float] = field(default_factory=dict)  # weights; none: the server's default
    tenants: Mapping[str, float] = field(default_factory=dict)  # weights; none: no credentials

    def __post_init__(self) -> None:
        arrivals.check(self.arrivals)
        _ = self._prompt, self._output, self._log
        _within("--cancel", self.cancel_share, 0, 1)
        _within("--slow-readers", self.slow_share, 0, 1)
        _within("--cancel and --slow-readers together", self.cancel_share + self.slow_share, 0, 1)
        _within("--correlation", self.correlation, -1, 1)
        most = sum(leg.requests or leg.level * (leg.seconds or 0.0) for leg in self.legs if self.loop == "open")
        if not self.replay and most > MOST_REQUESTS:
            raise BadLoad(f"--rate: {most:.3g} requests are due, {MOST_REQUESTS} are the most")
        if self.prefix_groups < 1:
            raise BadLoad(f"--shared-prefix: {self.prefix_groups} groups: expected at least 1")
        unknown = set(self.priorities) - set(PRIORITIES)
        if unknown:
            raise BadLoad(f"--priorities: {', '.join(sorted(unknown))}: expected {', '.join(PRIORITIES)}")

    @cached_property
    def _prompt(self) -> lengths.Lengths:
        return lengths.parse(self.prompt, "--prompt")

    @cached_property
    def _output(self) -> lengths.Lengths:
        return lengths.parse(self.output, "--output")

    @cached_property
    def _log(self) -> Sequence[logs.Entry]:
        if not self.replay:
            return ()
        (leg,) = self.legs
        entries = logs.read(Path(self.replay), self.replay_speed)[: leg.requests]
        return [entry for entry in entries if leg.seconds is None or entry.at_s < leg.seconds]

    @cached_property
    def _prefixes(self) -> list[tuple[int, ...]]:
        draw = self._draw(_PREFIXES)
        return [_ids(draw, self.shared_prefix) for _ in range(self.prefix_groups)]

    def as_json(self) -> dict[str, Any]:
        """Every value by name; of files, what is in them."""
        values = asdict(self)
        if self.replay:
            values["replay"] = hashlib.sha256(repr(self._log).encode()).hexdigest()
        for name, text in (("prompt", self.prompt), ("output", self.output)):
            if text.startswith("cdf:"):
                values[name] = hashlib.sha256(repr(getattr(self, f"_{name}")).encode()).hexdigest()
        return values

    @property
    def digest(self) -> str:
        """Names the load: equal ones have equal digests."""
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()[:16]

    @property
    def shared(self) -> bool:
        """Whether prompts have beginnings in common."""
        return self.shared_prefix > 0 or self.turns > 1

    def due(self) -> Iterator[tuple[int, float]]:
        """(leg, seconds after the start) of each conversation of an open loop, in order."""
        if self.replay:
            return iter([(0, entry.at_s) for entry in self._log])
        legs = [(leg.level, leg.seconds, leg.requests) for leg in self.legs]
        return arrivals.times_s(self.arrivals, legs, self._draw(_ARRIVALS))

    def conversation(self, number: int) -> Conversation:
        """Conversation `number`, 0 and up: the turns and what becomes of them."""
        draw = self._draw(_CONVERSATIONS, number)
        prefix = self._prefixes[int(draw.integers(self.prefix_groups))]
        priority, tenant = _choose(draw, self.priorities), _choose(draw, self.tenants)
        turns = []
        for turn in range(self.turns):
            prompt, output = self._lengths(number, draw)
            fate = float(draw.random())
            cancelled, slow = fate < self.cancel_share, fate >= 1 - self.slow_share
            turns.append(
                Turn(
                    token_ids=(*(prefix if turn == 0 else ()), *_ids(draw, prompt)),
                    output=output,
                    cancel_after=int(draw.integers(1, output + 1)) if cancelled else 0,
                    pause_s=self.slow_pause_s if slow else 0.0,
                )
            )
        return Conversation(number, tuple(turns), self.think_s, priority, tenant)

    def _lengths(self, number: int, draw: np.random.Generator) -> tuple[int, int]:
        if self.replay:
            entry = self._log[number]
            return entry.prompt_tokens, entry.output_tokens
        prompt, output = lengths.correlated(draw.random(), draw.random(), self.correlation)
        return self._prompt.at(prompt), self._output.at(output)

    def _draw(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *stream))


@dataclass(frozen=True)
class Turn:
    """One request of a conversation."""

    token_ids: tuple[int, ...]  # what it adds to what was said before
    output: int  # tokens to generate, exactly
    cancel_after: int = 0  # the reader leaves after so many tokens; 0: it stays
    pause_s: float = 0.0  # the reader's pause after each message


@dataclass(frozen=True)
class Conversation:
    """Requests that follow one another."""

    number: int
    turns: tuple[Turn, ...]
    think_s: float = 0.0
    priority: str | None = None  # None: the server's default
    tenant: str | None = None  # None: no credentials


def weights(text: str, name: str) -> dict[str, float]:
    """`a:3,b:1` or `a,b` as weights by name. Raises BadLoad."""
    found: dict[str, float] = {}
    for part in text.split(","):
        word, colon, weight = part.partition(":")
        try:
            found[word] = float(weight) if colon else 1.0
        except ValueError:
            raise BadLoad(f"{name} {part!r}: expected NAME:WEIGHT") from None
        if not word or not 0 < found[word] < float("inf"):
            raise BadLoad(f"{name} {part!r}: expected NAME:WEIGHT, the weight positive")
    return found


def _choose(draw: np.random.Generator, among: Mapping[str, float]) -> str | None:
    if not among:
        return None
    running = list(itertools.accumulate(among.values()))
    place = np.searchsorted(running, draw.random() * running[-1], side="right")
    return list(among)[int(place)]


def _ids(draw: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(draw.integers(FIRST_ID, VOCABULARY_SIZE, size=count).tolist())


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadLoad(f"{name} {value}: expected {low} to {high}")
