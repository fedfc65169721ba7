"""What Linux says of this process and of the machine. Read, never written; what is not there is left out."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from services.common import metric_names as names

if TYPE_CHECKING:
    from services.common.metrics import Metrics

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STEAL_COLUMN = 8  # of the line "cpu" in /proc/stat: name, user, nice, system, idle, iowait, irq, softirq, steal
_RESOURCES = ("cpu", "memory", "io")


def sample(metrics: Metrics, proc: Path = Path("/proc")) -> None:
    """Takes processor time, memory, threads, pressure and steal."""
    times = os.times()
    metrics.total(names.CPU_TIME, times.user, "user")
    metrics.total(names.CPU_TIME, times.system, "system")
    with contextlib.suppress(OSError, ValueError, IndexError):
        metrics.set(names.MEMORY, int((proc / "self/statm").read_text().split()[1]) * _PAGE_BYTES)
    with contextlib.suppress(OSError, ValueError, IndexError):
        after_name = (proc / "self/stat").read_text().rpartition(")")[2].split()
        metrics.set(names.THREADS, int(after_name[17]))
    with contextlib.suppress(OSError, ValueError, IndexError), (proc / "stat").open() as lines:
        metrics.total(names.STEAL, int(lines.readline().split()[_STEAL_COLUMN]) / _TICKS_PER_S)
    for resource in _RESOURCES:
        with contextlib.suppress(OSError, ValueError, IndexError):
            metrics.set(names.PRESSURE, pressure((proc / "pressure" / resource).read_text()), resource)


def pressure(text: str) -> float:
    """Share of the last 10 s, 0 to 1, from the first line of a file of /proc/pressure: "some avg10=1.23 ...".

    Raises:
        ValueError, IndexError: the text is something else.
    """
    return float(text.split()[1].removeprefix("avg10=")) / 100
