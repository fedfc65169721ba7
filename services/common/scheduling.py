"""Which thread the kernel lets go first where there are fewer cores than threads. Knows no service.

A step of the engine is computed by a team of threads that meet many times in it: where one of them is interrupted, all
wait. Everything else here works for a fraction of a millisecond, many times a second. As batch work (SCHED_BATCH of
Linux) it still gets its share, but a thread of it that wakes up does not interrupt one that computes: it takes a free
core at once, or its turn a few milliseconds later, with all that has gathered until then.
"""

from __future__ import annotations

import contextlib
import os


def give_way() -> None:
    """Makes the calling thread, and those that it starts from now on, batch work; where there is none, nothing."""
    _set("SCHED_BATCH")


def take_precedence() -> None:
    """Makes the calling thread, and those that it starts from now on, ordinary again."""
    _set("SCHED_OTHER")


def _set(name: str) -> None:
    policy = getattr(os, name, None)  # none beside Linux
    if policy is not None:
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setscheduler(0, policy, os.sched_param(0))
