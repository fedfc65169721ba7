"""Guarantees of compare and gate: red on a slowdown, green on no change, and no verdict on what cannot be compared."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.bench import comparison
from headrace.bench.comparison import FAIL, INCONCLUSIVE, PASS, Refused, compare
from headrace.cli import __main__ as command
from headrace.cli import bench_compare, output
from tests.headrace.bench import runs

TRIALS, NEEDED, PAIRS = 20, 19, 8


def verdict(trial: int, slowdown: float) -> str:
    try:
        return compare(*runs.pairs(trial, PAIRS, slowdown)).verdict
    except Refused as refused:
        return str(refused)


def test_the_gate_is_red_on_a_slowdown_of_ten_percent() -> None:
    """In at least 19 of 20 trials, on a machine whose own speed moves by 10 % from pair to pair."""
    assert sum(verdict(trial, 1.1) == FAIL for trial in range(TRIALS)) >= NEEDED


def test_the_gate_is_green_on_no_change() -> None:
    """In at least 19 of 20 trials, on the same machine."""
    assert sum(verdict(trial, 1.0) == PASS for trial in range(TRIALS, 2 * TRIALS)) >= NEEDED


@pytest.fixture(scope="module")
def same() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return runs.pairs(0, PAIRS, 1.0)


@pytest.fixture(scope="module")
def faster() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return runs.pairs(0, PAIRS, 0.8)


def test_an_improvement_is_a_change_too(faster: Any) -> None:
    """Two-sided, unless the caller says that better is well."""
    found = compare(*faster)
    assert found.verdict == FAIL
    assert all("better" in row.why for row in found.rows if row.verdict == FAIL)
    assert compare(*faster, allow_better=True).verdict == PASS


def test_few_pairs_are_inconclusive(same: Any) -> None:
    """Five pairs hold no interval of 95 %."""
    found = compare(same[0][:5], same[1][:5])
    assert found.verdict == INCONCLUSIVE
    assert any("6 pairs are the fewest" in row.why for row in found.rows)


def test_counters_are_held_tightly(same: Any) -> None:
    """2 % more tokens than the baseline fails, where times may move by 5 %; steps are a matter of time."""
    changed = copy.deepcopy(same[1])
    for one in changed:
        one["counters"] = {"step_count": 150, "decoded_token_count": 490}
    found = compare(same[0], changed)
    assert found.verdict == FAIL
    assert [row.figure.name for row in found.rows if row.verdict == FAIL] == ["decoded token count"]
    for one in changed:
        one["counters"] = same[0][0]["counters"]
        one["totals"] = {**one["totals"], "failed_requests": 1}
    assert [row.figure.name for row in compare(same[0], changed).rows if row.verdict == FAIL] == ["failed requests"]


def test_what_is_not_judged_decides_nothing(same: Any) -> None:
    """No request kept its objectives, and an engine that counts no steps: shown, no reason for a verdict."""
    sides = copy.deepcopy(same)
    for one in (*sides[0], *sides[1]):
        one["legs"][0]["figures"]["goodput_per_s"] = 0.0
        one["counters"]["step_count"] = 0
    assert compare(*sides).verdict == PASS


def test_processor_time_fails_where_the_clock_sees_nothing(same: Any) -> None:
    """10 % more fails; a difference that is not shown asks for nothing, however wide its interval."""
    sides = copy.deepcopy(same)
    noise = np.random.default_rng(5)
    for factor, verdict in ((1.1, FAIL), (1.0, PASS)):
        for side, times in zip(sides, (1.0, factor), strict=True):
            for one in side:
                used = times * float(np.exp(noise.normal(0, 0.02 if factor > 1 else 0.2)))
                one["cpu_ms_a_token"] = {"all": used, "engine": used}
        found = compare(*sides)
        assert found.verdict == verdict
        assert [row.figure.name for row in found.rows if row.verdict == FAIL] == ["CPU ms a token, all"] * (factor > 1)


@pytest.mark.parametrize(
    ("part", "values", "named"),
    [
        ("hardware", {"cores": 4}, "hardware, cores: 2 and 4"),
        ("model", {"other": "Tiny"}, "model, other: unset and Tiny"),
        ("versions", {"python": "3.12.0", "code": "abc"}, "versions, python: 3.11.2 and 3.12.0"),
        ("workload", {"digest": "else"}, "workload, digest"),
        (
            "configuration",
            {"HEADRACE_ENGINE_BLOCK_SIZE": "32"},
            "configuration, HEADRACE_ENGINE_BLOCK_SIZE: unset and 32",
        ),
    ],
)
def test_runs_of_different_kinds_are_refused_by_what_differs(same: Any, part: str, values: Any, named: str) -> None:
    """Each part of the fingerprint; a setting that is named as the change may differ."""
    other = copy.deepcopy(same[1])
    for one in other:
        one["fingerprint"][part] = values
    with pytest.raises(Refused, match=named):
        compare(same[0], other)
    if part == "configuration":
        found = compare(same[0], other, changed=["HEADRACE_ENGINE_BLOCK_SIZE"])
        assert found.verdict == PASS
        assert named in found.notes[0]


def test_other_code_is_what_is_compared(same: Any) -> None:
    """The code may differ between the sides, not within one."""
    other = copy.deepcopy(same[1])
    for one in other:
        one["fingerprint"]["versions"]["code"] = "def"
    assert compare(same[0], other).notes == ["versions, code: abc and def"]
    other[3]["fingerprint"]["versions"] = {**other[3]["fingerprint"]["versions"], "code": "ghi"}
    with pytest.raises(Refused, match="code: def and ghi"):
        compare(same[0], other)


def test_an_invalid_run_is_refused(same: Any) -> None:
    """Nothing is concluded from it, here neither."""
    other = copy.deepcopy(same[1])
    other[2] |= {"verdict": "INVALID", "problems": ["send lag"]}
    with pytest.raises(Refused, match="is INVALID"):
        compare(same[0], other)
    with pytest.raises(Refused, match="8 of the baseline, 7"):
        compare(same[0], same[1][:7])


def keep(place: Path, reports: list[dict[str, Any]], side: str) -> list[str]:
    for report in reports:
        folder = place / f"{side}-{report['id']}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps(report))
    return [f"{side}-{report['id']}" for report in reports]


def test_the_exit_code_of_the_gate_is_the_verdict(
    same: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 PASS, 1 FAIL, 2 refused, 3 INCONCLUSIVE; compare shows the same and ends with 0."""
    base, like = keep(tmp_path, same[0], "a"), keep(tmp_path, same[1], "b")
    slow = keep(tmp_path, runs.pairs(0, PAIRS, 1.2)[1], "c")

    def gate(kind: str, *candidate: str) -> int:
        options = ["--archive", str(tmp_path), "--baseline", *base[: len(candidate)], "--candidate", *candidate]
        return command.main(["bench", kind, *options])

    assert gate("gate", *like) == output.OK
    assert gate("gate", *slow) == output.FAILED
    assert gate("gate", *like[:3]) == bench_compare.INCONCLUSIVE
    assert gate("gate", "gone") == output.BAD_USAGE
    capsys.readouterr()
    assert gate("compare", *slow) == output.OK
    shown = capsys.readouterr().out
    assert shown.startswith(comparison.FAIL)
    assert "worse: +" in shown


def test_history_marks_the_first_run_after_a_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twelve runs, then twelve that take half as long again: one change, where it is."""
    made = runs.pairs(3, 12, 1.0)[0] + runs.pairs(2, 12, 1.5)[1]
    for number, report in enumerate(made):
        report["started_at"], report["id"] = f"2026-01-{number + 1:02}T00:00:00+00:00", f"run-{number:02}"
    keep(tmp_path, made, "x")
    file = tmp_path / "history.json"
    assert command.main(["bench", "history", "--archive", str(tmp_path), "--json", str(file)]) == output.OK
    (group,) = json.loads(file.read_text())
    marked = {row["id"]: row["changed"] for row in group["runs"] if row["changed"]}
    assert marked == {"run-12": ["ttft", "tpot", "e2e"]}
    assert "run-12" in capsys.readouterr().out
