"""Measures two contestants by turns, and says how far apart they are. Knows neither of them.

Turns alternate (A B, B A, A B, ...), so that whatever else the machine does, and however warm it gets, meets both
alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bench.peers.contestants import Contestant
from headrace.bench.peers.figures import VALUES
from headrace.bench.statistics import Interval, paired_ratio

SETTLE_S = 0.3  # threads of the one before may still be spinning
_FIRST_NUMBER = 2  # of the prompts; lower ones warmed up

Show = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Row:
    """One value of both, pair by pair."""

    value: str  # of `figures.VALUES`
    ours: Sequence[float]
    peer: Sequence[float]

    def ratio(self) -> Interval:
        """Ours by theirs: the median over pairs."""
        return paired_ratio(self.peer, self.ours)

    def as_json(self) -> dict[str, Any]:
        """Everything that was measured, and what follows from it."""
        return {
            "value": self.value,
            "unit": VALUES[self.value].unit,
            "ours": {"median": statistics.median(self.ours), "each": list(self.ours)},
            "peer": {"median": statistics.median(self.peer), "each": list(self.peer)},
            "ratio": self.ratio().as_json(),
        }


def compare(
    ours: Contestant, peer: Contestant, figures: Sequence[str], pairs: int, show: Show = lambda _text, _share: None
) -> Iterator[Row]:
    """Rows as they are measured; a value that only one of them tells has none.

    Args:
        ours: first of the first pair.
        peer: second of it.
        figures: of `figures.FIGURES`.
        pairs: of each figure, at least 1.
        show: told what happens, and the share that is done.

    Raises:
        RunFailed: one of them cannot do it.
    """
    for contestant in (ours, peer):
        show(f"{contestant.title}: warming up", None)
        contestant.warm_up()
    for done, figure in enumerate(figures):
        found: dict[str, dict[str, list[float]]] = {"ours": {}, "peer": {}}
        for pair in range(pairs):
            turns = [("ours", ours), ("peer", peer)]
            for side, contestant in turns if pair % 2 == 0 else reversed(turns):
                show(f"{figure}, pair {pair + 1} of {pairs}: {contestant.title}", (done + pair / pairs) / len(figures))
                time.sleep(SETTLE_S)
                for name, value in contestant.measure(figure, _FIRST_NUMBER + pair).items():
                    found[side].setdefault(name, []).append(value)
        for name, values in found["ours"].items():
            if name in found["peer"]:
                yield Row(name, values, found["peer"][name])
