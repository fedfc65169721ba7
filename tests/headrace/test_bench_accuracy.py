"""The accuracy gate measures what it says, passes int8 on the default model, and fails what is beyond a limit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from headrace.bench import accuracy
from headrace.cli import __main__ as command
from services.engine.config import EngineConfig
from services.engine.kernels import ReferenceKernels, native
from services.engine.model.config import load_config
from services.engine.model.decoder import Decoder
from services.engine.model.weights import WeightReader
from services.engine.plan import PlannedSequence, build_plan
from services.engine.runner import allocate_kv
from tests.engine.factories import tiny_config, write_model

needs_native = pytest.mark.skipif(native.load() is not None, reason="int8 needs the extension")
IDS = [(7 * i * i + 3 * i) % 97 for i in range(75)]


def _perplexity(path: Path, ids: list[int], window: int) -> float:
    """Plain float32, window by window."""
    model, kernels = load_config(path), ReferenceKernels()
    decoder = Decoder(model, WeightReader(path, model, torch.float32), kernels, torch.float32, window)
    loss = places = 0.0
    for start in range(0, len(ids), window):
        part = torch.tensor(ids[start : start + window], dtype=torch.int32)
        table = torch.arange(1, window // 8 + 2, dtype=torch.int32).numpy()
        plan = build_plan([PlannedSequence(part.numpy(), 0, table, logit_count=1)], 8)
        hidden = decoder.forward(
            token_ids=part,
            positions=torch.from_numpy(plan.positions),
            slots=torch.from_numpy(plan.slots).long(),
            kv=allocate_kv(model, window // 8 + 1, 8, torch.float32),
            batch=kernels.prepare(plan, torch.float32),
        )
        logits = decoder.logits(hidden, torch.arange(len(part) - 1))
        loss += float(functional.cross_entropy(logits, part[1:].long(), reduction="sum"))
        places += len(part) - 1
    return math.exp(loss / places)


@needs_native
def test_the_figures_are_what_they_say(tmp_path: Path) -> None:
    """Perplexity is that of the text in its windows; a model against itself differs in nothing; int8 does a little."""
    path = write_model(tmp_path, tiny_config(torch_dtype="bfloat16"))
    same = accuracy.measure(EngineConfig(path), IDS, window=32)
    assert same["places"] == 31 + 31 + 10
    assert same["perplexity"]["baseline"] == pytest.approx(_perplexity(path, IDS, 32), rel=0.02)
    assert (same["perplexity_ratio"], same["agreement"], same["drift"], same["failures"]) == (1, 1, 0, [])
    assert same["divergence"] == pytest.approx(0, abs=1e-6)
    quantised = accuracy.measure(EngineConfig(path, quantization="int8"), IDS, window=32)
    assert quantised["perplexity"]["baseline"] == same["perplexity"]["baseline"]
    assert 0 < quantised["mean_drift"] < quantised["drift"]
    assert quantised["weight_bytes"]["candidate"] < quantised["weight_bytes"]["baseline"]
    kept = accuracy.measure(EngineConfig(path, kv_cache_dtype="int8"), IDS, window=32)
    assert kept["perplexity"]["baseline"] == same["perplexity"]["baseline"]
    assert 0 < kept["mean_drift"] < kept["drift"]
    assert kept["kv_bytes_per_token"] == {"baseline": 2 * 2 * 2 * 16 * 2, "candidate": 2 * 2 * 2 * (16 + 4)}


def test_beyond_a_limit_and_not_a_number_fail() -> None:
    """Each figure is held by itself; what is exactly at its limit is within."""
    limits = {"perplexity_ratio": 1.02, "agreement": 0.9, "drift": 4.0}
    good = {"perplexity_ratio": 1.02, "agreement": 0.9, "drift": 4.0, "limits": limits}
    assert accuracy.failures(good) == []
    for name, value in (("perplexity_ratio", 1.03), ("agreement", 0.89), ("drift", 4.1)):
        assert accuracy.failures({**good, name: value}) == [name]
        assert accuracy.failures({**good, name: math.nan}) == [name]


@pytest.mark.parametrize(("ids", "window"), [([1], 8), ([1, 2, 3], 1)])
def test_too_little_to_compare_is_refused(ids: list[int], window: int) -> None:
    """Rather than a figure made of nothing."""
    with pytest.raises(ValueError, match="at least 2"):
        accuracy.measure(EngineConfig(Path()), ids, window=window)


@needs_native
def test_the_command_passes_int8_on_the_default_model(
    default_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the text of the checkout and its own limits; the same fails a limit that nothing can keep."""
    assert command.main(["bench", "accuracy", "--tokens", "300", "--window", "150", "--json", "-"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert (report["places"], report["failures"]) == (298, [])
    assert 1 < report["perplexity"]["baseline"] < 200
    assert "within" in captured.err
    assert command.main(["bench", "accuracy", "--tokens", "40", "--max-drift", "0.0001"]) == 1
    assert "beyond" in capsys.readouterr().out


def test_what_is_not_there_is_bad_usage(
    default_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text, and a processor that could."""
    assert command.main(["bench", "accuracy", "--text", str(tmp_path / "none.txt")]) == 2
    assert "none.txt" in capsys.readouterr().err
    monkeypatch.setattr(native, "_state", ["the processor has no AVX2"])
    assert command.main(["bench", "accuracy", "--tokens", "40"]) == 2
    assert "the processor has no AVX2" in capsys.readouterr().err
