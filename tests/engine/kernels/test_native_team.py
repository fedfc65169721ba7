"""The extension's team where it has fewer cores than members, or fewer members than it asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.engine.kernels.test_native import needs_native

_STEPS = """
import os, sys, time
from pathlib import Path
os.sched_setaffinity(0, eval(sys.argv[2]))
import torch
from tests.engine.factories import tiny_config
from tests.engine.kernels.test_native import twins, planned_steps
ours, _, _ = twins(Path(sys.argv[1]), tiny_config(hidden_size=256, intermediate_size=1024), 16)
torch.set_num_threads(2)
plans = planned_steps([[300, 1, 1], [40, 5, 1], [700, 1, 1]] + [[1, 1, 1]] * 8, 16, 97)
torch.save([ours.logits(plan) for plan in plans], sys.argv[3])
(plan,) = planned_steps([[1]], 16, 97)
began = time.process_time()
for _ in range(100):
    ours.logits(plan)
print((time.process_time() - began) / 100)
"""


def _run(tmp_path: Path, cores: set[int], **variables: str) -> tuple[float, list[torch.Tensor]]:
    """Seconds of processor time of a tiny step, and the logits of larger ones, of a team of two on these cores."""
    result = tmp_path / "logits.pt"
    command = [sys.executable, "-c", _STEPS, str(tmp_path), str(cores), str(result)]
    environment = {**os.environ, **variables}
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    return float(found), torch.load(result)


@needs_native
def test_members_on_one_core_do_not_spin_for_each_other(tmp_path: Path) -> None:
    """A member that waits lets the one it waits for have the core; whoever computes a piece, its bits are the same.

    A step of a tiny model then takes well below 2 ms of processor time; 13 where members span for 0.6 ms. The team may
    also be smaller than it was to be.
    """
    cores = os.sched_getaffinity(0)
    seconds, alone = _run(tmp_path, {min(cores)})
    assert seconds < 0.002
    _, together = _run(tmp_path, cores)
    _, lonely = _run(tmp_path, cores, OMP_THREAD_LIMIT="1")
    for others in (together, lonely):
        assert all(map(torch.equal, alone, others))
