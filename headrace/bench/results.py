"""What a run of a workload measured, and its report. Knows neither engine nor gateway."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """One pass over a workload."""

    seconds: float  # from the first request to the last token
    prompt_tokens: int
    cached_tokens: int  # of the prompt tokens: found in the prefix cache
    output_tokens: int
    first_token_s: Sequence[float]  # of each request: from sending it to its first token
    between_tokens_s: Sequence[float] = ()  # of each request: mean time a token after the first
    cpu_seconds: float = 0.0  # of the process, where the engine is in it

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens over wall time."""
        return self.output_tokens / self.seconds

    def as_json(self) -> dict[str, Any]:
        """Numbers by name; times in seconds."""
        return {
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "output_tokens_per_s": self.output_tokens_per_s,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
            "ttft_s": {"p50": quantile(self.first_token_s, 0.5), "p95": quantile(self.first_token_s, 0.95)},
            "tpot_s": {"p50": quantile(self.between_tokens_s, 0.5), "p95": quantile(self.between_tokens_s, 0.95)},
        }


class RunFailed(Exception):
    """A request of the workload failed, or did not generate what it had to; nothing was measured."""


def compared(runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Interleaved passes by variant: median seconds of each, and the median ratio to the first variant, pass by pass.

    Passes that ran one after the other share the machine's mood, so their ratio says more than their seconds. Where
    others use the machine too, the ratio of processor time says most.
    """
    first = next(iter(runs.values()))

    def ratio(own: Sequence[Run], of: str) -> float:
        pairs = [(getattr(run, of), getattr(beside, of)) for run, beside in zip(own, first, strict=True)]
        return statistics.median(one / other if other else 0.0 for one, other in pairs)

    return {
        name: {
            "seconds": statistics.median(run.seconds for run in own),
            "ratio": ratio(own, "seconds"),
            "cpu_ratio": ratio(own, "cpu_seconds"),
            "cached_tokens": own[0].cached_tokens,
        }
        for name, own in runs.items()
    }


def quantile(values: Sequence[float], share: float) -> float:
    """The value at a quantile (nearest rank); 0 where there is none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def report(workload: str, mode: str, runs: Sequence[Run], **more: Any) -> dict[str, Any]:
    """The report of several passes: the median one's numbers, and every pass.

    Args:
        workload: its name.
        mode: "engine" in process, or "pipeline".
        runs: at least one.
        more: what else to say: settings, machine.
    """
    median = sorted(runs, key=lambda run: run.output_tokens_per_s)[(len(runs) - 1) // 2]
    rates = [run.output_tokens_per_s for run in runs]
    return {
        "workload": workload,
        "mode": mode,
        **median.as_json(),
        "output_tokens_per_s_spread": statistics.pstdev(rates) if len(rates) > 1 else 0.0,
        "runs": [run.as_json() for run in runs],
        **more,
    }
