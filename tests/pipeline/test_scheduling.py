"""In the real processes, the engine's team alone is ordinary work; everything else gives way to it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


def policies(pid: int) -> set[int]:
    return {os.sched_getscheduler(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()}


@pytest.mark.skipif(sys.platform != "linux", reason="policies of Linux")
def test_only_the_engines_team_is_ordinary(pipeline):
    """Threads of gRPC and of the event loop too are batch work; the engine's own event loop is."""
    pids = pipeline.supervisor.pids
    for name in ("gateway", "tokenizer", "stream"):
        assert policies(pids[name]) == {os.SCHED_BATCH}, name
    assert os.sched_getscheduler(pids["engine"]) == os.SCHED_BATCH
    assert os.SCHED_OTHER in policies(pids["engine"])
