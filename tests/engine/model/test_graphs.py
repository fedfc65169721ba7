"""Recorded decode steps give what eager ones give, padding included. On a CPU, replaying is computing anew."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from services.engine.kernels.triton import unusable
from tests.engine.factories import finish_all, make_engine, make_request, tiny_config, write_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if unusable(DEVICE) is not None and not os.environ.get("CI"):
    pytest.skip(f"the GPU kernels cannot run here: {unusable(DEVICE)}", allow_module_level=True)

from services.engine.model.graphs import Compute, GraphedDecoder, Replay, graph_sizes


class AgainRecorder:
    """Notes how many tokens are recorded, and computes anew over the fixed tensors at each replay."""

    def __init__(self) -> None:
        self.recorded: list[int] = []
        self.replayed: list[int] = []

    def __call__(self, compute: Compute) -> Replay:
        result = compute()
        size = result.shape[0]
        self.recorded.append(size)

        def replay() -> torch.Tensor:
            self.replayed.append(size)
            return result.copy_(compute())

        return replay


def test_sizes_are_recorded_largest_first() -> None:
    """Few sequences have sizes of their own; the most is among them."""
    assert graph_sizes(20) == [20, 16, 8, 4, 2, 1]
    assert graph_sizes(3) == [3, 2, 1]
    assert graph_sizes(256) == [256, 224, 192, 160, 128, 112, 96, 80, 64, 56, 48, 40, 32, 24, 16, 8, 4, 2, 1]


def test_recorded_steps_give_the_same_ids(tmp_path: Path) -> None:
    """Requests that end one after another, so that batches shrink and old rows become padding; chunks are eager."""
    path = write_model(tmp_path, tiny_config(num_attention_heads=6, hidden_size=96, num_hidden_layers=1))
    prompts = {1: ([5, 6, 7], 7), 2: (list(range(20, 45)), 3), 3: ([9], 5)}

    def requests() -> list[object]:
        return [make_request(i, prompt=prompt, max_tokens=most) for i, (prompt, most) in prompts.items()]

    expected = finish_all(make_engine(path, kernels="reference"), *requests())  # type: ignore[arg-type]
    engine = make_engine(path, kernels="triton", cuda_graphs=False, max_num_seqs=4)
    recorder = AgainRecorder()
    decoder = GraphedDecoder(engine._runner._decoder, graph_sizes(4), widest=32, device=DEVICE)  # type: ignore[arg-type]
    decoder.record(engine._runner.kv, recorder, 1)
    decoder.record(engine._runner.kv, recorder)
    assert recorder.recorded == [4, 4, 2, 1]
    assert all(not layer[0].any() for layer in engine._runner.kv)
    engine._runner._decoder = decoder
    assert finish_all(engine, *requests()) == expected  # type: ignore[arg-type]
    assert set(recorder.replayed) == {4, 2, 1}
