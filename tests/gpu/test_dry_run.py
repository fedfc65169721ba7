"""`make gpu-check` runs to its end without a GPU, on tiny shapes, and says plainly what it is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from services.engine.kernels import triton
from tests.gpu.__main__ import OK, main

if triton.unusable(torch.device("cpu")) is not None and not os.environ.get("CI"):
    pytest.skip(f"the GPU kernels cannot run here: {triton.unusable(torch.device('cpu'))}", allow_module_level=True)


def test_every_part_runs_on_tiny_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Parity holds, each figure that has a goal is there, none is judged."""
    assert main(["--dry-run", "--json", str(tmp_path / "figures.json")]) == OK
    shown = capsys.readouterr().out
    assert "DRY RUN" in shown
    assert "goal" not in shown
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["wrong"] == []
    assert not figures["judged"]
    rows = {row["name"]: row for row in figures["rows"]}
    assert {name for name, row in rows.items() if name.startswith("parity") and row["note"] == "equal"} == {
        "parity: ids in float32",
        "parity: int8 keys and values",
        "parity: 0.6B: the host waits for ids alone, no memory grows",
        "parity: 0.6B: logits beside transformers",
    }
    assert {name for name, row in rows.items() if row["goal"] is not None and row["value"] > 0} == {
        "8B: prefill of 12, of the matmul",
        "8B: 1 streams, decode of the copy",
        "8B: 2 streams, decode of the copy",
        "0.6B: 1 streams, graphs are faster by",
        "8B: 2 streams, of transformers",
        "0.6B: 2 streams, of transformers",
    }


def test_parts_without_time_are_skipped_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The table says so of each; nothing that was not checked counts as wrong."""
    assert main(["--dry-run", "--seconds", "0"]) == OK
    assert capsys.readouterr().out.count("skipped: no time left") >= 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """In one line."""
    assert main([]) == OK
    assert capsys.readouterr().out.startswith("gpu-check: torch finds no CUDA device here; skipped.")
