"""`make soak`: a tiny model, tens of thousands of requests, and then: nothing leaked, nothing hung, memory flat.

The run is cut into rounds. After each, all requests have ended, every block must be free or cached, the allocator
gives back what nobody holds, and the size of the process is noted. It is flat when the 95 % confidence interval of its
growth a round, in the second half, has 0 in it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import torch

from services.engine.engine import Engine, EngineConfig
from services.engine.request import Request, SamplingParams
from tests.engine.factories import tiny_config, write_model
from tests.soak.callers import Callers

ROUNDS = 40
LARGEST_STEP = 64  # so that all shapes of products stay within what the matrix library keeps
MOST_ROWS = 16
T_95 = 2.093  # Student's t at 95 %, two-sided, for 19 degrees of freedom: 20 steps


def main() -> int:
    """Run it; 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000, help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what callers do (%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        engine = Engine.load(
            EngineConfig(
                write_model(Path(directory), tiny_config()),
                dtype="float32",
                kv_blocks=40,
                max_num_seqs=MOST_ROWS,
                max_num_batched_tokens=LARGEST_STEP,
                threads=1,
            )
        )
        see_every_shape(engine)
        callers = Callers(engine, arguments.seed)
        sizes: list[float] = []
        for number in range(ROUNDS):
            callers.run(arguments.requests // ROUNDS)
            sizes.append(_round(callers, number))
        callers.loop.stop(drain=True)
        ended = callers.loop.join(10)
    slope, margin = growth(sizes[ROUNDS // 2 - 1 :])
    report = {
        "requests": sum(callers.endings.values()),
        "endings": dict(callers.endings),
        "tokens": callers.token_count,
        "preemptions": engine.stats().preemption_count,
        "prefix_hit_tokens": engine.stats().prefix_hit_token_count,
        "seconds": round(time.monotonic() - begun, 1),
        "rss_mb_first_middle_last": [round(sizes[place], 1) for place in (0, ROUNDS // 2, -1)],
        "rss_growth_kb_a_round": round(slope * 1e3, 2),
        "rss_growth_margin_kb": round(margin * 1e3, 2),
        "rss_mb": [round(size, 2) for size in sizes],
        "faults": callers.faults,
        "flat": abs(slope) <= margin,
        "loop_ended": ended,
    }
    print(json.dumps(report, indent=2))  # noqa: T201 - the report is for whoever ran it
    return 0 if ended and report["flat"] and not callers.faults else 1


def see_every_shape(engine: Engine) -> None:
    """Compute steps of every size once: the matrix library keeps code for each shape, which is no leak."""
    told = SamplingParams(prompt_logprobs=0)  # so that the head too computes any number of rows
    for count in range(1, LARGEST_STEP + 1):
        engine.add(Request(-count, [1] * count, max_tokens=1, sampling=told, ignore_eos=True))
        while engine.has_work:
            engine.step()
    for rows in range(1, MOST_ROWS + 1):
        for place in range(rows):
            engine.add(Request(-1 - place, [1 + place], max_tokens=2, ignore_eos=True))
        while engine.has_work:
            engine.step()
    engine.flush_prefix_cache()


def _round(callers: Callers, number: int) -> float:
    """Hold what must be true when nothing is open; the size of this process in MB."""

    def check(engine: Engine) -> None:
        stats = engine.stats()
        engine.check_integrity()
        counts = (stats.running_count, stats.waiting_count, stats.paused_count, stats.kv_wasted_token_count)
        if counts != (0, 0, 0, 0) or stats.kv_block_free + stats.kv_block_cached != stats.kv_block_total:
            raise AssertionError(f"round {number}: not idle: {stats}")

    callers.loop.call(check).result(10)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def growth(sizes: list[float]) -> tuple[float, float]:
    """Mean step from one size to the next, and the half width of its 95 % confidence interval.

    A size is the sum of what was taken before, so it is the steps that are independent, not the sizes. A leak makes
    every step positive; a cache that fills makes a few.
    """
    steps = [after - before for before, after in pairwise(sizes)]
    return statistics.mean(steps), T_95 * statistics.stdev(steps) / math.sqrt(len(steps))


if __name__ == "__main__":
    sys.exit(main())
