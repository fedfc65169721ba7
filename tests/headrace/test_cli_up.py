"""Guarantees of `headrace up`, with the real four processes on the default model."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.cli import stages

FREE_PORTS = ["--port=0", "--tokenizer-port=0", "--stream-port=0", "--engine-port=0"]
SMALL = [*FREE_PORTS, "--kv-blocks=64"]
WAIT_S = 60


@contextmanager
def running(*options: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    command = [sys.executable, "-m", "headrace.cli", "up", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            yield process
        finally:
            process.kill()


def children(process: subprocess.Popen[str]) -> dict[str, int]:
    """Process id of each service that `up` has started."""
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
    found = {}
    for pid in pids:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        found[words[-2].removeprefix("services.")] = int(pid)
    return found


def wait_ready(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready on 127.0.0.1:"), line


def test_ask_once(default_model_dir: Path, tmp_path: Path) -> None:
    """`up --ask` answers, shows a table whose stages sum to the wall time, leaves nothing running, and ends with 0."""
    report_file = tmp_path / "report.json"
    question = "What is the capital of France? Answer in one sentence."
    with running("--ask", question, "--json", str(report_file)) as process:
        printed, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, told
    report = json.loads(report_file.read_text(encoding="utf-8"))
    assert "Paris" in report["text"]
    assert printed.startswith(report["text"])
    assert f"trace {report['trace_id']}" in printed
    timings = stages.from_json(report["timings"])
    total = sum(stage.duration_ns for stage in stages.all_stages(timings))
    assert total == pytest.approx(timings.total_ns, rel=0.001)
    assert 0 <= report["wall_ns"] - total < 0.1e9  # what the client and its connection add
    assert re.search(r"^= wall +\d", printed, re.MULTILINE)


def test_stopped_by_a_signal(default_model_dir: Path) -> None:
    """SIGTERM stops gateway, stream, engine and tokenizer in this order, and the command ends with 0."""
    with running(*SMALL) as process:
        wait_ready(process)
        process.send_signal(signal.SIGTERM)
        _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, told
    assert re.findall(r"^(\w+) +\|.*\bstopped\b", told, re.MULTILINE) == ["gateway", "stream", "engine", "tokenizer"]


def test_a_long_answer_is_stopped_by_a_signal(default_model_dir: Path) -> None:
    """SIGINT in the middle of an answer to `--ask` ends it at once, with 130."""
    with running("--ask", "Write the word hello a thousand times.", "--kv-blocks=600", "--threads=1") as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=5)
    assert process.returncode == 130, told


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
def test_one_is_killed(default_model_dir: Path) -> None:
    """One process is killed: the command says which and how, stops the others, and ends with 1."""
    with running(*SMALL, "--quiet") as process:
        wait_ready(process)
        pids = children(process)
        assert set(pids) == {"gateway", "stream", "engine", "tokenizer"}
        os.kill(pids["engine"], signal.SIGKILL)
        _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "headrace: engine ended (killed by SIGKILL)" in told
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())


def test_bad_setting(default_model_dir: Path) -> None:
    """A bad setting of one process is the reason that the command gives, within seconds."""
    with running(*SMALL, HEADRACE_STREAM_COALESCE_TOKENS="many") as process:
        _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    last = told.strip().splitlines()[-1]
    assert last.startswith("headrace: stream ended (exit code 1): HEADRACE_STREAM_COALESCE_TOKENS='many': expected")


def test_options_that_need_another() -> None:
    """`--json` without `--ask` would report nothing: it is refused."""
    with running("--json", "-") as process:
        _, told = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert "--ask" in told
