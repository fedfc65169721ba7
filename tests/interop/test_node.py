"""A client in another language (Node, @grpc/grpc-js, the committed protos) asks, streams, cancels and is refused."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.conftest import Pipeline, start_pipeline, until
from tests.pipeline.otlp import Receiver

HERE = Path(__file__).parent
QUESTION = "What is the capital of France? Answer in one sentence."


def need_node() -> str:
    """Path of node; without it the test is skipped, and fails in CI."""
    node = shutil.which("node")
    if node and shutil.which("npm"):
        return node
    sentence = "node and npm (20 or newer) are needed for the test of a client in another language"
    if os.environ.get("CI"):
        pytest.fail(sentence)
    pytest.skip(sentence)


@pytest.fixture(scope="module")
def node() -> str:
    """Node with the two packages of package-lock.json, installed once for each state of that file."""
    program = need_node()
    wanted = hashlib.sha256((HERE / "package-lock.json").read_bytes()).hexdigest()
    stamp = HERE / "node_modules" / ".headrace-lock"
    if not stamp.exists() or stamp.read_text(encoding="ascii") != wanted:
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"npm ci failed:\n{done.stderr}"
        stamp.write_text(wanted, encoding="ascii")
    return program


@pytest.fixture(scope="module")
def pipeline(node: str, default_model_dir: Path) -> Iterator[Pipeline]:
    """The real four processes."""
    receiver = Receiver()
    with start_pipeline(receiver) as running:
        yield running
    receiver.stop()


@pytest.fixture(scope="module")
def said(node: str, pipeline: Pipeline) -> dict[str, Any]:
    """What the Node client saw."""
    command = [node, "client.mjs", pipeline.target, QUESTION]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_lists_and_asks(said: dict[str, Any]) -> None:
    """The model is listed, and a unary answer has text, ending, usage, receipt and the caller's labels."""
    assert [model["name"] for model in said["models"]] == [said["answer"]["model"]]
    answer = said["answer"]["answers"][0]
    assert "Paris" in answer["text"]
    assert answer["ending"]["finish_reason"] == "FINISH_REASON_STOP"
    assert said["answer"]["usage"]["completion_token_count"] == answer["ending"]["completion_token_count"] > 1
    assert said["answer"]["timings"]["total_ns"] >= said["answer"]["timings"]["time_to_first_token_ns"] > 0
    assert len(said["answer"]["trace_id"]) == 32
    assert said["answer"]["metadata"] == {"client": "node"}


def test_streams(said: dict[str, Any]) -> None:
    """The streamed text is the unary one; numbers have no gap; the final message is the last and accounts for all."""
    streamed = said["streamed"]
    assert streamed["status"] == "OK"
    assert "".join(streamed["texts"]) == said["answer"]["answers"][0]["text"]
    assert streamed["sequence_numbers"] == list(range(len(streamed["texts"]) + 1))
    assert streamed["token_count"] == streamed["final"]["usage"]["completion_token_count"]
    assert {"headrace-timings-bin", "headrace-request-id", "headrace-trace-id"} <= streamed["trailing"].keys()


def test_cancels(said: dict[str, Any], pipeline: Pipeline) -> None:
    """A cancelled stream ends CANCELLED, and nothing of it is left in the engine."""
    assert said["cancelled"]["status"] == "CANCELLED"
    assert said["cancelled"]["final"] is None
    assert len(said["cancelled"]["texts"]) >= 2
    until(lambda: pipeline.baseline() == (0, 0, 0, 0, 0, 0), 10, "the engine forgets the cancelled stream")


def test_is_refused(said: dict[str, Any]) -> None:
    """A bad field is INVALID_ARGUMENT that names it, with details."""
    assert said["refused"]["status"] == "INVALID_ARGUMENT"
    assert "max_tokens" in said["refused"]["details"]
    assert said["refused"]["with_details"] is True


def test_without_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without node the test is skipped here, and fails in CI."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception):
        need_node()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="node and npm"):
        need_node()


def test_the_example_runs(node: str, pipeline: Pipeline, tmp_path: Path) -> None:
    """examples/service.mjs streams an answer and its count."""
    root = HERE.parents[1]
    (tmp_path / "examples").mkdir()
    shutil.copy(root / "examples" / "service.mjs", tmp_path / "examples")
    (tmp_path / "protos").symlink_to(root / "protos")
    (tmp_path / "node_modules").symlink_to(HERE / "node_modules")
    command = [node, "examples/service.mjs", pipeline.target, "Water runs down to the sea."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\S.*\n\d+ tokens\n$", done.stdout, re.DOTALL), done.stdout
