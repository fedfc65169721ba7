"""Figures of the records of a run. Percentiles come from all records together, never from percentiles.

`DEFINITIONS` says what each figure is; reports print it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.bench.records import CANCELLED, OK, Record
from headrace.bench.statistics import percentile

DEFINITIONS: Mapping[str, str] = {
    "ttft": "time to first token: from when the request was due to the arrival of the first message with tokens",
    "ttft_from_send": "the same from when the request was sent",
    "tpot": "time per output token: first to last message with tokens, over the tokens after the first message",
    "itl": "inter-token latency: the gap before a message over its tokens, once for each of them",
    "message_gap": "the gap before each message with tokens after the first: the pause that a reader sees",
    "e2e": "end to end: from when the request was due to the end of the answer",
    "e2e_from_send": "the same from when the request was sent",
    "output_tokens_per_s": "tokens that arrived in the measured time, over it",
    "requests_per_s": "answers that ended well, of the requests measured, over the measured time",
    "goodput_per_s": "of these, those that kept every objective",
}
LATENCIES = ("ttft", "ttft_from_send", "tpot", "itl", "message_gap", "e2e", "e2e_from_send")
SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True)
class Slo:
    """Service level objectives: the most that each latency of a request may be, seconds; inf: anything."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf

    def met(self, record: Record) -> bool:
        """Whether a request kept them all; one that failed kept none."""
        return (
            record.outcome == OK
            and record.ttft_s <= self.ttft
            and not (tpot(record) or 0.0) > self.tpot
            and record.e2e_s <= self.e2e
        )

    def as_json(self) -> dict[str, float]:
        """Those that are set."""
        return {name: value for name, value in vars(self).items() if math.isfinite(value)}


def parse_slo(text: str) -> Slo:
    """`ttft=500ms,tpot=50ms,e2e=10s`. Raises ValueError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(ttft|tpot|e2e)=(\d+(?:\.\d+)?)(ms|s)", part.strip())
        if not match:
            raise ValueError(f"--slo {part!r}: expected like ttft=500ms,tpot=50ms,e2e=10s")
        found[match[1]] = float(match[2]) * (1e-3 if match[3] == "ms" else 1.0)
    return Slo(**found)


def tpot(record: Record) -> float | None:
    """Seconds a token after the first message; None where all came in one."""
    later = record.received_tokens - record.messages[0][1] if record.messages else 0
    return (record.last_s - record.first_s) / later if later else None


def figures(measured: Sequence[Record], all_records: Sequence[Record], slo: Slo) -> dict[str, Any]:
    """All figures of a stretch of a run; latencies in seconds.

    The measured time goes from the first to the last sending of `measured`. Requests that were cancelled as planned
    have a time to first token and no end; slow readers make their own gaps, so only their time to first token counts.

    Args:
        measured: the requests that count, in the order of sending.
        all_records: every request of the run: their tokens arrive in the measured time too.
        slo: for the goodput.
    """
    begun, ended = measured[0].sent_s, measured[-1].sent_s
    window_s = max(ended - begun, 1e-9)
    ok = [record for record in measured if record.outcome == OK]
    outcomes = Counter(record.outcome for record in measured)
    within = [count for record in all_records for at, count in record.messages if begun <= at <= ended]
    good = sum(map(slo.met, measured))
    wanted = len(measured) - outcomes[CANCELLED]
    return {
        "measured_s": window_s,
        "requests": {
            "measured": len(measured),
            "ok": len(ok),
            "cancelled": outcomes.pop(CANCELLED, 0),
            "failed": sum(outcomes.values()) - outcomes.pop(OK, 0),
            "errors": dict(outcomes),
        },
        "tokens": {
            "prompt": sum(record.prompt_tokens for record in ok),
            "cached": sum(record.cached_tokens for record in ok),
            "output": sum(record.output_tokens for record in ok),
            "a_message": sum(within) / max(1, len(within)),
        },
        "output_tokens_per_s": sum(within) / window_s,
        "requests_per_s": len(ok) / window_s,
        "goodput_per_s": good / window_s,
        "slo_share": good / wanted if wanted else 0.0,
        "in_flight": _in_flight(all_records, begun, ended),
        **{name: distribution(values) for name, values in _latencies(measured).items()},
    }


def distribution(values: Sequence[float]) -> dict[str, float | int | None]:
    """Count, mean, percentiles and maximum; None where too few values lie beyond a percentile to state it."""
    count = len(values)
    if not count:
        return {"count": 0, "mean": None, **dict.fromkeys(SHARES), "max": None}
    stated = {
        name: percentile(values, share) if count * (1 - share) >= 1 - 1e-9 else None for name, share in SHARES.items()
    }
    return {"count": count, "mean": float(np.mean(values)), **stated, "max": float(max(values))}


def _latencies(measured: Sequence[Record]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for record in measured:
        if not record.messages or record.outcome not in (OK, CANCELLED):
            continue
        found["ttft"].append(record.ttft_s)
        found["ttft_from_send"].append(record.first_s - record.sent_s)
        if record.slow_reader:
            continue
        for (before, _), (at, count) in zip(record.messages, record.messages[1:], strict=False):
            found["message_gap"].append(at - before)
            found["itl"] += [(at - before) / count] * count
        if record.outcome != OK:
            continue
        per_token = tpot(record)
        found["tpot"] += [] if per_token is None else [per_token]
        found["e2e"].append(record.e2e_s)
        found["e2e_from_send"].append(record.ended_s - record.sent_s)
    return found


def _in_flight(records: Sequence[Record], begun: float, ended: float) -> float:
    """Requests open on average."""
    if ended <= begun:
        return float(len(records))
    open_s = sum(max(0.0, min(record.ended_s, ended) - max(record.sent_s, begun)) for record in records)
    return open_s / (ended - begun)
