"""Runs in virtual time as reports: a server with a speed, on a machine with moods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.bench import analysis
from headrace.bench.analysis import Evidence
from headrace.bench.load.spec import Leg, LoadSpec
from headrace.bench.load.workers import ClientUse
from headrace.bench.metrics import Slo
from tests.headrace.bench.virtual import Asked, drive

IDLE = ClientUse(wall_s=10.0, cpu_s=1.0, lags_s=[0.0] * 10)
FINGERPRINT = {
    "hardware": {"cores": 2},
    "versions": {"python": "3.11.2", "code": "abc"},
    "model": {"tiny": "Tiny"},
    "workload": {"digest": ""},
    "configuration": {},
}
REQUESTS = 40


def run(number: int, seed: int, slowdown: float, draw: np.random.Generator, **fingerprint: Any) -> dict[str, Any]:
    """One run: `slowdown` times the usual service time, which already holds the machine's mood.

    Every request has its own usual time, the same in all runs of a seed, and 5 % of noise.
    """
    usual = np.exp(np.random.default_rng(seed).normal(0, 0.15, REQUESTS))
    noise = np.exp(draw.normal(0, 0.05, REQUESTS))

    def script(asked: Asked) -> Sequence[tuple[float, int]]:
        times = slowdown * usual[asked.conversation.number] * noise[asked.conversation.number]
        return [(0.1 * times, 4), (0.08 * times, 4)]

    spec = LoadSpec("open", (Leg(5.0, requests=REQUESTS),), seed=seed, prompt="8", output="8")
    records, _ = drive(spec, script)
    evidence = Evidence(records, [IDLE], counters={"step_count": 100 + seed, "decoded_token_count": 480})
    report = analysis.report(spec, evidence, Slo(), fewest=20)
    parts = {**FINGERPRINT, "workload": {"digest": spec.digest}, **fingerprint}
    return {
        "format": 1,
        "id": f"run-{number}",
        "started_at": f"2026-01-01T00:{number // 60:02}:{number % 60:02}+00:00",
        "intent": {"change": "", "expect": "", "side_effects": ""},
        "fingerprint": parts,
        **report,
    }


def pairs(trial: int, count: int, slowdown: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Pairs that share a mood of 10 %; each run has 1.5 % of its own."""
    draw = np.random.default_rng((7, trial))
    sides: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for number in range(count):
        mood = float(np.exp(draw.normal(0, 0.1)))
        for side, factor in zip(sides, (1.0, slowdown), strict=True):
            own = mood * factor * float(np.exp(draw.normal(0, 0.015)))
            side.append(run(len(sides[0]) + len(sides[1]), number, own, draw))
    return sides
