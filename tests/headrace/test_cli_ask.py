"""Guarantees of `headrace ask` where connections break."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import __main__ as command
from tests.headrace.test_client_sync import Server


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    server = Server()
    yield server
    server.close()


def test_resumable(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With `--resumable` a lost connection costs nothing, and is told."""
    server.gateway.drop_at = [1, 2]
    report = tmp_path / "ask.json"
    argv = ["ask", "Where?", "--resumable", "--target", server.target, "--json", str(report)]
    assert command.main(argv) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("The capital is Paris.\n")
    assert "resumed 2 times" in printed
    assert json.loads(report.read_text())["resume_count"] == 2


def test_not_resumable(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Without it nothing is said of resuming, and no session is used."""
    assert command.main(["ask", "Where?", "--target", server.target]) == 0
    assert "resumed" not in capsys.readouterr().out
    assert server.gateway.session_calls == []
