"""Guarantees of `headrace bench run`: what it prints, writes and keeps, and that it concludes nothing when invalid."""

from __future__ import annotations

import asyncio
import csv
import json
import shutil
from pathlib import Path

import pytest

from headrace.bench import archive, records, steady, validity
from headrace.cli import __main__ as command
from headrace.cli import output
from tests.headrace.browser import opened
from tests.headrace.scripted_gateway import TRACE_ID, ScriptedGateway, serving

LOAD = ["--concurrency", "4", "--prompt", "20", "--shared-prefix", "16", "--output", "3"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Receipts are remembered in a place of the test's own."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


async def bench(*arguments: str, **values: object) -> tuple[int, ScriptedGateway]:
    gateway = ScriptedGateway()
    for name, value in values.items():
        setattr(gateway, name, value)
    async with serving(gateway) as target:
        code = await asyncio.to_thread(command.main, ["bench", "run", "--target", target, *arguments])
    return code, gateway


async def test_a_run_is_printed_written_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdict first; the same figures in every form; the archive gives the run back."""
    monkeypatch.setattr(validity, "LEAST_LIMIT_S", 60.0)  # the machine may be as busy as it likes
    monkeypatch.setattr(validity, "MOST_CPU", 60.0)
    monkeypatch.setattr(steady, "find", lambda *_: steady.Steadiness(0, 0.0))
    files = {name: str(tmp_path / name) for name in ("csv", "records", "html", "json", "archive")}
    options = [part for name, path in files.items() for part in (f"--{name}", path)]
    code, _ = await bench(*LOAD, "--requests", "150", "--min-requests", "50", *options, "--expect", "no change")
    shown = capsys.readouterr().out
    assert code == output.OK, shown
    assert shown.startswith("VALID")
    for word in ("ttft", "tpot", "e2e_from_send", "where the P99", "most of it in", "time to first token: from when"):
        assert word in shown
    report = json.loads((tmp_path / "json").read_text())
    assert report["legs"][0]["figures"]["requests"]["ok"] == report["legs"][0]["figures"]["ttft"]["count"]
    assert report["intent"]["expect"] == "no change"
    assert report["fingerprint"]["model"] == {"tiny": ", , 64 tokens"}
    kept = records.read(tmp_path / "records")
    assert len(kept) == 150
    assert all(record.trace_id == TRACE_ID and record.receipt["prefill_ns"] == 30_000_000 for record in kept)
    with (tmp_path / "csv").open() as file:
        assert len(list(csv.DictReader(file))) == 150
    place = tmp_path / "archive"
    (again,) = archive.all_runs(place)
    assert again == report == archive.load(place, report["id"])
    assert archive.load_records(place, report["id"]) == kept
    capsys.readouterr()
    assert TRACE_ID in shown
    assert command.main(["trace", TRACE_ID]) == output.OK  # the receipts of the slowest are remembered
    assert "prefill" in capsys.readouterr().out
    page = (tmp_path / "html").read_text()
    assert "default-src 'none'" in page
    for title in ("Latency, cumulative", "Latency over time", "Throughput over time", "Time to first token by stage"):
        assert title in page
    browser = shutil.which("chromium")
    if browser:
        drawn, said = await asyncio.to_thread(opened, browser, tmp_path / "html", tmp_path / "profile")
        assert "CONSOLE" not in said
        assert drawn.count("<svg") == 4
        assert drawn.count("<polyline") == 4
        assert drawn.count("<rect") > 7


async def test_an_invalid_run_concludes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Too few requests: reasons, no figure, exit code 1; what was seen is kept."""
    page = tmp_path / "page.html"
    kept = ["--archive", str(tmp_path / "archive"), "--html", str(page)]
    code, _ = await bench(*LOAD, "--requests", "20", *kept)
    shown = capsys.readouterr().out
    assert code == output.FAILED
    assert shown.startswith("INVALID")
    assert "too few samples" in shown
    assert "ttft" not in shown
    assert "INVALID" in page.read_text()
    assert len(archive.all_runs(tmp_path / "archive")) == 1


async def test_the_options_reach_the_requests(tmp_path: Path) -> None:
    """Tenants with their keys, priorities, exact prompts, a ramp of two legs."""
    tenants = tmp_path / "tenants"
    tenants.write_text("acme, secret\n")
    more = ["--tenants", str(tenants), "--priorities", "batch", "--archive", str(tmp_path / "archive")]
    await bench("--concurrency", "4", "2", "--shared-prefix", "16", *more, "--requests", "5", "--output", "3")
    _, gateway = await bench("--rate", "50", "100", "--requests", "5", "--output", "3", *more)
    asked = [request.generation for request in gateway.requests if hasattr(request, "generation")]
    assert len(asked) == 10
    assert {len(one.token_ids.ids) for one in asked} == {128}
    assert {headers.get("authorization") for headers in gateway.headers} == {"Bearer secret"}
    first, second = archive.all_runs(tmp_path / "archive")
    assert [leg["level"] for leg in first["legs"]] == [4.0, 2.0]
    assert [leg["level"] for leg in second["legs"]] == [50.0, 100.0]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--rate", "0"], "--rate"),
        (["--rate", "1", "--prompt", "0"], "--prompt"),
        (["--rate", "1", "--slo", "fast"], "--slo"),
        (["--rate", "1", "--shared-prefix", "x"], "--shared-prefix"),
        (["--rate", "1", "--slow-readers", "-1"], "--slow-readers"),
        (["--rate", "1", "--tenants", "/not/there"], "--tenants"),
        (["--rate", "1", "--priorities", "urgent"], "urgent"),
        (["--replay", "/not/there"], "--replay"),
        (["--rate", "1", "--speed", "2"], "--speed"),
        (["--rate", "1", "--seed", "-1"], "--seed"),
        (["--rate", "1e9"], "--rate: 3e+10 requests"),
        (["--rate", "1", "--html", "/not/there/page"], "--html /not/there/page"),
        (["--rate", "1", "--records", "/"], "--records /"),
        (["--rate", "1", "--concurrency", "1"], "--concurrency"),
        ([], "--rate"),
    ],
)
def test_bad_options_are_refused_by_name(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At once: nothing is started, and the code says bad usage."""
    assert command.main(["bench", "run", "--target", "127.0.0.1:1", *arguments]) == output.BAD_USAGE
    assert named in capsys.readouterr().err


def test_what_is_no_archived_run_is_refused(tmp_path: Path) -> None:
    """Nothing there, or a file of another kind."""
    with pytest.raises(archive.ArchiveError, match="neither"):
        archive.load(tmp_path, "gone")
    for text in ("{", "{}", '{"id": 1, "fingerprint": {}, "legs": [], "started_at": "", "format": 99}'):
        (tmp_path / "file").write_text(text)
        with pytest.raises(archive.ArchiveError, match="file"):
            archive.load(tmp_path, str(tmp_path / "file"))
