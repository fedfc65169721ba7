"""Where the time of the slowest requests went: their receipts beside those of the usual ones.

The stages of a receipt add up to what the server saw of the time to first token; what the client waited beyond that is
`send lag` before and `connection` after. So the rows add up to what the client saw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.bench.records import OK, Record
from headrace.bench.statistics import percentile
from headrace.cli.stages import FIRST_TOKEN_STAGES

STAGES = ("send_lag", *FIRST_TOKEN_STAGES, "unexplained", "connection")
BUCKETS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # upper bounds, prompt tokens
SLOWEST_SHOWN = 5


def stages_s(record: Record) -> dict[str, float]:
    """Seconds of each of `STAGES`; they add up to the time to first token as the client saw it."""
    found = {name: int(record.receipt.get(f"{name}_ns", 0)) / 1e9 for name in FIRST_TOKEN_STAGES}
    server_s = int(record.receipt.get("time_to_first_token_ns", 0)) / 1e9
    send_lag_s = record.sent_s - record.intended_s
    return {
        "send_lag": send_lag_s,
        **found,
        "unexplained": server_s - sum(found.values()),
        "connection": record.first_s - record.sent_s - server_s,
    }


def explain(measured: Sequence[Record]) -> dict[str, Any]:
    """Stages of the slowest 1 % and of the middle, over all and by length of the prompt; seconds.

    By time to first token: the slowest are at least one request, the middle those from P40 to P60.
    """
    usable = [record for record in measured if record.outcome == OK and record.receipt and record.messages]
    slowest = sorted(usable, key=lambda record: record.ttft_s, reverse=True)[:SLOWEST_SHOWN]
    return {
        "all": _compared(usable),
        "by_prompt": {name: _compared(inside) for name, inside in _buckets(usable).items()},
        "slowest": [
            {
                "trace_id": record.trace_id,
                "request_id": record.request_id,
                "prompt_tokens": record.prompt_tokens,
                "ttft_s": record.ttft_s,
                "stages_s": stages_s(record),
            }
            for record in slowest
        ],
    }


def largest(one: Mapping[str, Any]) -> str:
    """The stage that most of the difference between the slowest and the middle is in; "" where there is none."""
    tail, middle = one["tail_s"], one["middle_s"]
    return max(tail, key=lambda name: tail[name] - middle[name]) if tail else ""


def _compared(records: Sequence[Record]) -> dict[str, Any]:
    times = [record.ttft_s for record in records]
    if not records:
        return {"count": 0, "p50_s": None, "p99_s": None, "middle_s": {}, "tail_s": {}}
    low, median, high, worst = (percentile(times, share) for share in (0.4, 0.5, 0.6, 0.99))
    middle = [record for record, time in zip(records, times, strict=True) if low <= time <= high]
    tail = sorted(records, key=lambda record: record.ttft_s)[-math.ceil(len(records) / 100) :]
    return {
        "count": len(records),
        "p50_s": median,
        "p99_s": worst,
        "middle_s": _mean(middle),
        "tail_s": _mean(tail),
    }


def _mean(records: Sequence[Record]) -> dict[str, float]:
    found = [stages_s(record) for record in records]
    return {name: float(np.mean([one[name] for one in found])) for name in STAGES}


def _buckets(records: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for bound in (*BUCKETS, None):
        name = f">{BUCKETS[-1]}" if bound is None else f"<={bound}"
        low = max((other for other in BUCKETS if bound is None or other < bound), default=0)
        inside = [r for r in records if low < r.prompt_tokens and (bound is None or r.prompt_tokens <= bound)]
        if inside:
            found[name] = inside
    return found
