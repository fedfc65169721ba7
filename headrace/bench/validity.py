"""Whether a run measured the server: the verdict that comes before every figure. Knows no report.

A run is INVALID where the tool was late, or short of a processor, or what it counted does not add up; nothing is
concluded from such a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bench.load.workers import ClientUse
from headrace.bench.records import CANCELLED, OK, Record
from headrace.bench.statistics import percentile

VALID, INVALID = "VALID", "INVALID"

FEWEST_REQUESTS = 100
MOST_CPU = 0.8  # of one core, by a client process: Python cannot use more than one
LEAST_LIMIT_S = 0.010  # delays of the tool below this are nothing; above, they must be small beside what is measured
MOST_DELAY = 0.1  # of the median time to first token
MOST_FAILED = 0.01  # percentiles of the rest say nothing of those that failed
MOST_UNEXPLAINED = 0.01  # of the receipts' time: a few ms of one request in fifty are a busy machine's
MOST_SEEN = 0.01  # of the prompt tokens of prompts that share nothing
RESIDUAL_NS, RESIDUAL_SHARE = 2_000_000, 0.02  # what no stage explains, as the receipt's own test allows


@dataclass(frozen=True)
class Checks:
    """What was found; `problems` is empty where the run is valid."""

    problems: tuple[str, ...]
    facts: Mapping[str, Any]  # the figures that were looked at, by name

    @property
    def verdict(self) -> str:
        """In one word."""
        return verdict(self.problems)


def verdict(problems: Sequence[str]) -> str:
    """VALID where there is no problem."""
    return INVALID if problems else VALID


def check(
    measured: Sequence[Record],
    uses: Sequence[ClientUse],
    *,
    steadiness: Sequence[str] = (),
    dropped_spans: float | None = None,
    fewest: int = FEWEST_REQUESTS,
    shared: bool = True,
) -> Checks:
    """Looks at a run.

    Args:
        measured: its requests without warm-up.
        uses: of its client processes.
        steadiness: what is not steady.
        dropped_spans: of the server, during the run; None where nobody said.
        fewest: requests that must have been measured.
        shared: prompts have beginnings in common, so a prefix cache may know them.
    """
    ok = [record for record in measured if record.outcome == OK]
    failures = Counter(f"{r.outcome}: {r.error}" for r in measured if r.outcome not in (OK, CANCELLED))
    failed = failures.total()
    most = f", most often {failures.most_common(1)[0][0]}" if failures else ""
    send_lag_s = percentile([record.sent_s - record.intended_s for record in measured], 0.99)
    loop_lag_s = percentile([lag for use in uses for lag in use.lags_s], 0.99)
    cpu = max((use.cpu_s / use.wall_s for use in uses), default=0.0)
    # By the receipts: what the client saw is longer where the client is late, and must not excuse it.
    receipts = [record for record in ok if record.receipt]
    first_ns = [int(record.receipt.get("time_to_first_token_ns", 0)) for record in receipts]
    first_s = percentile(first_ns, 0.5) / 1e9 if receipts else 0.0
    limit_s = max(LEAST_LIMIT_S, MOST_DELAY * first_s)
    miscounted = sum(record.miscounted for record in measured)
    cached = sum(record.cached_tokens for record in ok) / max(1, sum(record.prompt_tokens for record in ok))
    unexplained = [record for record in receipts if _unexplained(record)]
    unexplained_receipts = len(unexplained) / max(1, len(receipts))
    unexplained_ns = sum(abs(int(record.receipt["residual_ns"])) for record in unexplained)
    unexplained_share = unexplained_ns / max(1, sum(int(record.receipt.get("total_ns", 0)) for record in receipts))
    found = {
        f"client CPU: a client process used {cpu:.0%} of a core; use more --processes, or less load": cpu > MOST_CPU,
        f"send lag: P99 {send_lag_s * 1e3:.1f} ms, more than {limit_s * 1e3:.0f} ms": send_lag_s > limit_s,
        f"client lag: the event loop was P99 {loop_lag_s * 1e3:.1f} ms late, more than {limit_s * 1e3:.0f} ms": (
            loop_lag_s > limit_s
        ),
        f"too few samples: {len(measured)} requests measured, {fewest} are needed": len(measured) < fewest,
        f"failures: {failed} of {len(measured)} requests{most}": failed > MOST_FAILED * len(measured),
        f"token counts: usage, messages and plan disagree in {miscounted} requests": miscounted > 0,
        f"residual: {unexplained_receipts:.1%} of the receipts leave more time unexplained than they may, together "
        f"{unexplained_share:.1%} of all": unexplained_share > MOST_UNEXPLAINED,
        f"prompts seen before: the prefix cache held {cached:.0%} of prompts that share nothing; use another --seed": (
            not shared and cached > MOST_SEEN
        ),
        f"dropped spans: {dropped_spans or 0:.0f}": bool(dropped_spans),
    }
    facts = {
        "client_cpu": cpu,
        "send_lag_p99_s": send_lag_s,
        "client_lag_p99_s": loop_lag_s,
        "lag_limit_s": limit_s,
        "failed": failed,
        "miscounted": miscounted,
        "cached_prompt_share": cached,
        "unexplained_receipts": unexplained_receipts,
        "unexplained_share": unexplained_share,
        "dropped_spans": dropped_spans,
    }
    return Checks((*(text for text, bad in found.items() if bad), *filter(None, steadiness)), facts)


def _unexplained(record: Record) -> bool:
    residual, total = int(record.receipt.get("residual_ns", 0)), int(record.receipt.get("total_ns", 0))
    return abs(residual) > max(RESIDUAL_NS, RESIDUAL_SHARE * total)
