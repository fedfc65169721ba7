"""Guarantees of `headrace bench sweep`: what it refuses, and what it says of a knee."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from headrace.bench import archive, steady, validity
from headrace.cli import __main__ as command
from headrace.cli import bench_sweep, output
from tests.headrace.browser import opened
from tests.headrace.scripted_gateway import ScriptedGateway, serving


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--knee"),
        (["--knee", "speed"], "--knee"),
        (["--vary", "max_num_seqs=8"], "SETTING=VALUE,VALUE"),
        (["--vary", "max_num_seqs=8,8"], "SETTING=VALUE,VALUE"),
        (["--vary", "colour=red,blue"], "colour"),
        (["--vary", "block_size=8,16", "--target", "127.0.0.1:1"], "--target"),
        (["--knee", "rate", "--prompt", "0"], "--prompt"),
    ],
)
def test_bad_options_are_refused_by_name(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At once: nothing is started, and the code says bad usage."""
    assert command.main(["bench", "sweep", *arguments]) == output.BAD_USAGE
    assert named in capsys.readouterr().err


def test_a_knee_is_told_with_its_interval_and_what_to_run_at(tmp_path: Path) -> None:
    """In words, and as a page that a browser without network draws; fewer than six repetitions are called a range."""
    latency = {"count": 100, "p50": 0.1, "p95": 0.2}
    figures = {
        "slo_share": 0.99,
        "output_tokens_per_s": 500.0,
        "requests_per_s": 8.0,
        "ttft": latency,
        "tpot": latency,
        "e2e": latency,
    }
    report = {
        "over": "rate",
        "unloaded_s": {"ttft": 0.167},
        "slo_s": {"ttft": 0.5},
        "knee": {"value": 10.0, "low": 9.0, "high": 11.0, "count": 3},
        "recommended": 7.0,
        "recommended_concurrency": 4.4,
        "probes": [
            {"level": 20.0, "kept": False, "problems": ["not steady: much"], "figures": {**figures, "slo_share": 0.3}},
            {"level": 10.0, "kept": True, "problems": [], "figures": figures},
        ],
    }
    lines = bench_sweep.knee_lines(report)
    assert lines[0] == "objectives: ttft 500 ms (without load: ttft 167 ms)"
    assert lines[1] == "knee: 10 requests/s, 9 to 11 (range of 3, six hold 95 %)"
    assert lines[2] == "recommended, 70 % of it: 7 requests/s; concurrency 4"
    assert [row[:3] for row in bench_sweep.knee_table(report).rows] == [
        ("10", "kept", "99.0%"),
        ("20", "not steady", "30.0%"),
    ]
    page = bench_sweep.page(report, "open")
    assert "Throughput against latency" in page
    assert "knee: 10 requests/s" in page
    browser = shutil.which("chromium")
    if browser:
        (tmp_path / "page").write_text(page)
        drawn, said = opened(browser, tmp_path / "page", tmp_path / "profile")
        assert "CONSOLE" not in said
        assert drawn.count("<svg") == 4
        assert drawn.count('class="mark"') == 6


async def test_two_servers_that_are_there_are_compared_by_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as two builds: both get the same requests, every run is kept, and one pair is told to be too few."""
    monkeypatch.setattr(validity, "LEAST_LIMIT_S", 60.0)  # the machine may be as busy as it likes
    monkeypatch.setattr(validity, "MOST_CPU", 60.0)
    monkeypatch.setattr(steady, "find", lambda *_: steady.Steadiness(0, 0.0))
    load = ["--concurrency", "4", "--requests", "30", "--min-requests", "15", "--pairs", "1"]
    lengths = ["--prompt", "20", "--shared-prefix", "16", "--output", "3"]
    kept = ["--archive", str(tmp_path / "runs"), "--json", str(tmp_path / "json")]
    old, new = ScriptedGateway(), ScriptedGateway()
    async with serving(old) as one, serving(new) as other:
        options = ["bench", "sweep", "--vary", f"target={one},{other}", *load, *lengths, *kept]
        assert await asyncio.to_thread(command.main, options) == output.OK
    shown = capsys.readouterr()
    assert "6 pairs are the fewest" in shown.out
    assert f"run 3 of about 4: target={one}" in shown.err
    assert json.loads((tmp_path / "json").read_text())[other]["verdict"] == "INCONCLUSIVE"
    changes = [run["intent"]["change"] for run in archive.all_runs(tmp_path / "runs")]
    assert sorted(changes) == sorted(f"{kind}target={where}" for kind in ("", "warm-up of ") for where in (one, other))
    asked = [[r.generation.token_ids.ids for r in g.requests if hasattr(r, "generation")] for g in (old, new)]
    assert sorted(map(tuple, asked[0])) == sorted(map(tuple, asked[1]))
