"""Guarantees of the trials of the gate: what counts as enough, and that none is made twice."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from headrace.bench import gate_trials
from headrace.bench.comparison import FAIL, INCONCLUSIVE, PASS
from headrace.cli import output


@pytest.mark.parametrize(("wrong", "made", "good"), [(0, 20, True), (1, 20, True), (2, 20, False), (0, 19, False)])
def test_nineteen_of_twenty_are_enough(wrong: int, made: int, good: bool) -> None:
    """Of each kind, all of them made; those that are wrong are named with their reasons."""
    trials = [
        {"candidate": name, "trial": number, "verdict": INCONCLUSIVE if number < wrong else right, "why": ["noise"]}
        for name, right in (("slower", FAIL), ("same", PASS))
        for number in range(made)
    ]
    lines, enough = gate_trials.summary(trials)
    assert enough == good
    assert f"slower: {made - wrong} of {made} FAIL" in lines
    assert sum("noise" in line for line in lines) == 2 * wrong


def test_a_later_go_makes_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial by trial, both kinds in turn; those of other code do not count."""
    made: list[tuple[str, int]] = []

    def trial(_engine: Any, _servers: Any, candidate: str, number: int, _pairs: int) -> dict[str, Any]:
        made.append((candidate, number))
        verdict = gate_trials.WANTED[candidate]
        return {"candidate": candidate, "trial": number, "verdict": verdict, "why": [], "seconds": 1.0}

    def server(_engine: Any, name: str) -> AbstractContextManager[str]:
        return nullcontext(name)

    monkeypatch.setattr(gate_trials, "trial", trial)
    monkeypatch.setattr(gate_trials, "_server", server)
    results = tmp_path / "results"
    results.write_text(
        json.dumps({"engine": "null", "pairs": 8, "code": "other", "candidate": "same", "trial": 0}) + "\n"
    )
    assert gate_trials.main(["--results", str(results), "--at-most", "3"]) == output.FAILED  # not all are made
    assert made == [("slower", 0), ("same", 0), ("slower", 1)]
    assert gate_trials.main(["--results", str(results)]) == output.OK
    assert len(made) == len(set(made)) == 2 * gate_trials.TRIALS
