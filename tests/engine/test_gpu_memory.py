"""The pool of a GPU is what the largest step leaves of a share of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from services.engine.computing import make_decoder
from services.engine.config import EngineConfig
from services.engine.gpu_memory import BareRunner, GpuUse, pool_bytes, run_largest_step
from services.engine.model.config import load_config
from services.engine.placement import Placement
from services.engine.plan import Sampled
from services.engine.sampler import Sampler
from services.engine.step import LogitRow
from tests.engine.factories import tiny_config, write_model

GIB = 1 << 30


def test_the_pool_gets_what_is_left() -> None:
    """Of 80 GiB, 90 % are ours less what others have and weights, activations and graphs need."""
    assert pool_bytes(GpuUse(80 * GIB, outside=2 * GIB, peak=20 * GIB, graphs=GIB), 0.9) == 49 * GIB


def test_nothing_left_is_refused() -> None:
    """With the setting's name and the figures."""
    with pytest.raises(ValueError, match=rf"^gpu_memory_utilization is 0.25; of {80 * GIB} bytes, {2 * GIB} are"):
        pool_bytes(GpuUse(80 * GIB, outside=2 * GIB, peak=20 * GIB), 0.25)


def test_the_largest_step_is_as_large_as_a_step_may_be(tmp_path: Path) -> None:
    """Eight sequences of eight tokens, a block each and the null block, every row drawn."""
    path = write_model(tmp_path, tiny_config())
    config, model = EngineConfig(path, dtype="float32", max_num_seqs=8, max_num_batched_tokens=64), load_config(path)
    placement = Placement.choose(config, model)
    decoder, kernels = make_decoder(config, model, placement, 512)
    rows: list[int] = []

    class Noting(Sampler):
        def sample(self, logits: torch.Tensor, chosen: Sequence[LogitRow]) -> list[Sampled]:
            rows.append(len(chosen))
            assert not any(row.request.sampling.greedy for row in chosen)
            return super().sample(logits, chosen)

    size = run_largest_step(model, 512, config, BareRunner(decoder, kernels, Noting(frozenset()), placement))
    assert rows == [8]
    assert size == 9 * 16 * 2 * 2 * 16 * 4 * 2  # blocks, slots, keys and values, heads, dimensions, bytes, layers
