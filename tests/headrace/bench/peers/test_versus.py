"""Guarantees of the comparison: turns, pairs, ratios; and what the command says when it cannot compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench.peers import versus
from headrace.bench.peers.figures import Values
from headrace.cli import __main__ as command
from headrace.cli import bench_versus, output


class Scripted:
    """A contestant whose figures are known."""

    def __init__(self, title: str, turns: list[str], factor: float) -> None:
        self.title, self._turns, self._factor = title, turns, factor

    def warm_up(self) -> None:
        self._turns.append(f"{self.title} warms up")

    def measure(self, figure: str, number: int) -> Values:
        self._turns.append(f"{self.title} {figure} {number}")
        return {figure: self._factor * number, **({"w1-first-token": 1.0} if self.title == "ours" else {})}


def compared(monkeypatch: pytest.MonkeyPatch) -> tuple[list[versus.Row], list[str]]:
    monkeypatch.setattr(versus, "SETTLE_S", 0)
    turns: list[str] = []
    rows = versus.compare(Scripted("ours", turns, 3.0), Scripted("peer", turns, 2.0), ["w1", "w2"], 3)
    return list(rows), turns


def test_turns_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both warm up; then who is first changes from pair to pair, and both of a pair have the same prompts."""
    _, turns = compared(monkeypatch)
    assert turns[:2] == ["ours warms up", "peer warms up"]
    assert turns[2:8] == ["ours w1 2", "peer w1 2", "peer w1 3", "ours w1 3", "ours w1 4", "peer w1 4"]


def test_ratios_are_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each figure is a row of ours by theirs; what one of them does not tell is left out."""
    rows, _ = compared(monkeypatch)
    assert [row.value for row in rows] == ["w1", "w2"]
    for row in rows:
        assert (row.ratio().value, row.ratio().low, row.ratio().high) == (1.5, 1.5, 1.5)
        assert row.as_json()["ours"] == {"median": 9, "each": [6, 9, 12]}


def test_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line a figure."""
    rows, _ = compared(monkeypatch)
    report = {"ours": "ours", "peer": "peer", "pairs": 3, "rows": [row.as_json() for row in rows]}
    assert bench_versus.table(json.loads(json.dumps(report))).row_count == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--vs", "vllm"], "vllm is not installed; `python -m headrace.bench.peers.install vllm` does that"),
        (["--vs", "llamacpp", "--figure", "w2"], "--figure w2: llamacpp can be measured by one-stream, prompt"),
        (["--vs", "vllm-attention", "--figure", "w1"], "vllm-attention can be measured by attention-3, attention-7"),
        (["--vs", "engine"], "--vs engine goes with --pipeline or --target"),
        (["--vs", "smg"], "--vs smg goes with --pipeline or --target"),
        (["--figure", "w1"], "--figure goes with --vs"),
    ],
)
def test_what_cannot_be_compared(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line says what is missing or what cannot be, before anything is loaded."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    assert command.main(["bench", "offline", *arguments]) == output.BAD_USAGE
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_engine_beside_a_pipeline(default_model_dir: Path, tmp_path: Path) -> None:
    """Real processes: our engine alone, and clients of a whole pipeline, each generating what it is told to."""
    report = tmp_path / "report.json"
    small = ["--kv-blocks", "128", "--max-model-len", "1100"]
    asked = ["bench", "offline", "--pipeline", "--vs", "engine", "--figure", "prompt", "--pairs", "1"]
    assert command.main([*asked, *small, "--json", str(report)]) == output.OK
    rows = json.loads(report.read_text())["rows"]
    assert [row["value"] for row in rows] == ["prompt", "prompt-again"]
    for row in rows:
        assert row["ratio"]["value"] == pytest.approx(row["ours"]["each"][0] / row["peer"]["each"][0])
    assert rows[1]["ours"]["median"] < rows[0]["ours"]["median"]
