"""Where an engine computes; what cannot be had is refused by name, and without a GPU auto is the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine import placement
from services.engine.config import EngineConfig
from services.engine.kernels import native, triton
from services.engine.model.config import load_config
from services.engine.placement import Placement
from tests.engine.factories import tiny_config, write_model

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")


def _choose(tmp_path: Path, **changes: Any) -> Placement:
    path = write_model(tmp_path, tiny_config())
    return Placement.choose(EngineConfig(path, **changes), load_config(path))


@needs_no_gpu
def test_without_a_gpu_auto_is_the_cpu(tmp_path: Path) -> None:
    """Device and kernels follow the machine; float32 stays what the weights are."""
    assert _choose(tmp_path) == Placement(torch.device("cpu"), "cpu", torch.float32, torch.float32)
    assert _choose(tmp_path, kernels="reference").kernels == "reference"


@needs_no_gpu
@pytest.mark.skipif(native.load() is not None, reason="the extension is not here")
def test_bfloat16_is_kept_where_the_extension_alone_is_fast_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On AVX2; but not where other kernels compute."""
    monkeypatch.setattr(placement, "can_pack", lambda dtype: False)
    path = write_model(tmp_path, tiny_config(torch_dtype="bfloat16"))
    model = load_config(path)

    def chosen(**changes: Any) -> torch.dtype:
        return Placement.choose(EngineConfig(path, **changes), model).dtype

    assert chosen() is torch.bfloat16
    others: tuple[dict[str, Any], ...] = ({"kernels": "torch"}, {"deterministic": True}, {"tensor_parallel": 2})
    assert {chosen(**changes) for changes in others} == {torch.float32}


@needs_no_gpu
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By name: the device; and Triton's kernels, unless they are to be interpreted."""
    with pytest.raises(ValueError, match=r"^device is 'cuda'; torch finds no CUDA device here$"):
        _choose(tmp_path, device="cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"^kernels is 'triton'; "):
        _choose(tmp_path, kernels="triton")


@pytest.mark.skipif(triton.unusable(torch.device("cpu")) is not None, reason="triton is not here, or not interpreted")
def test_interpreted_kernels_run_on_a_cpu(tmp_path: Path) -> None:
    """For tests."""
    assert _choose(tmp_path, kernels="triton", device="cpu").kernels == "triton"


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "tpu"},
        {"device": "cuda", "deterministic": True},
        {"device": "cuda", "kernels": "torch"},
        {"tensor_parallel": 2, "deterministic": True},
        {"tensor_parallel": 0},
        {"gpu_memory_utilization": 1.2},
    ],
    ids=str,
)
def test_settings_that_exclude_each_other_are_refused(changes: dict[str, Any]) -> None:
    """The message begins with one of them."""
    with pytest.raises(ValueError, match=rf"^({'|'.join(changes)}) is "):
        EngineConfig(Path(), **changes)
