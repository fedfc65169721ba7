"""Guarantees of the sweeps, against servers in virtual time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.bench import analysis, sweep
from headrace.bench.analysis import Evidence
from headrace.bench.execute import Measuring, Server
from headrace.bench.load.spec import Leg, LoadSpec
from headrace.bench.load.workers import ClientUse, Where
from headrace.bench.metrics import Slo
from headrace.bench.records import Record
from headrace.bench.results import RunFailed
from tests.headrace.bench import runs
from tests.headrace.bench.virtual import Asked, drive

MEASURING = Measuring(Slo(), processes=1, fewest=20)
SETTING = "HEADRACE_ENGINE_MAX_NUM_SEQS"


def server(value: str = "") -> Server:
    return Server(Where("nowhere", {}, 1.0), {SETTING: value})


class Places:
    """A server with ten places of 100 ms: 100 requests a second are its limit."""

    def __init__(self) -> None:
        self.use = runs.IDLE

    def __call__(self, spec: LoadSpec, _server: Server, measuring: Measuring) -> tuple[dict[str, Any], list[Record]]:
        free = [0.0] * 10

        def script(asked: Asked) -> Sequence[tuple[float, int]]:
            place = free.index(min(free))
            begun = max(free[place], asked.now)
            free[place] = begun + 0.1
            return [(begun - asked.now + 0.05, 4), (0.05, 4)]

        records, _ = drive(spec, script)
        return analysis.report(spec, Evidence(records, [self.use]), measuring.slo, measuring.fewest), records


def test_the_knee_of_a_server_with_ten_places() -> None:
    """Closed loop: with up to 20 clients nobody waits longer than one other request takes."""
    spec = LoadSpec("closed", (Leg(1, requests=200),), prompt="8", output="8")
    search = sweep.KneeSweep(Places(), spec, server(), Measuring(Slo(ttft=0.17), processes=1, fewest=20))
    found = search.find(4, resolution=0.01, repeats=2)
    assert found.found == [20, 20]
    assert search.in_flight(20) == pytest.approx(20, rel=0.15)


def test_an_overloaded_open_loop_is_beyond_the_knee() -> None:
    """Its latency grows without end: not steady, which is an answer, not a failure of the run."""
    spec = LoadSpec("open", (Leg(1, requests=400),), prompt="8", output="8", arrivals="constant")
    search = sweep.KneeSweep(Places(), spec, server(), MEASURING)
    found = search.find(20, resolution=0.05, repeats=1)
    assert search.measuring.slo.ttft == pytest.approx(0.15)  # three times that of the server without load
    assert 90 <= found.level.value <= 105
    assert found.recommended == pytest.approx(0.7 * found.level.value)


def test_a_tool_at_its_limit_finds_no_knee() -> None:
    """What it would find is its own."""
    places = Places()
    places.use = ClientUse(wall_s=1.0, cpu_s=0.99, lags_s=[0.0] * 10)
    spec = LoadSpec("closed", (Leg(1, requests=100),), prompt="8", output="8")
    measuring = Measuring(Slo(ttft=1.0), processes=1, fewest=20)
    with pytest.raises(RunFailed, match="INVALID: client CPU"):
        sweep.KneeSweep(places, spec, server(), measuring).find(4, resolution=0.1, repeats=1)


def test_values_take_turns_and_are_compared_in_pairs() -> None:
    """A B B A ..., the same requests for both of a pair and others for the next; the slower value fails."""
    draw = np.random.default_rng(0)
    order: list[tuple[str, int]] = []

    def run(spec: LoadSpec, one: Server, _measuring: Measuring) -> tuple[dict[str, Any], list[Record]]:
        value = one.configuration[SETTING]
        order.append((value, spec.seed))
        slower = {"32": 1.0, "16": 1.0, "8": 1.2}[value]
        mood = float(np.exp(draw.normal(0, 0.01)))
        return runs.run(len(order), spec.seed, slower * mood, draw, configuration=dict(one.configuration)), []

    def keep(report: Mapping[str, Any], _records: Sequence[Record], change: str) -> dict[str, Any]:
        return {**report, "intent": {"change": change}}

    spec = LoadSpec("open", (Leg(5.0, requests=60),))
    servers = {value: server(value) for value in ("32", "16", "8")}
    found = sweep.vary(run, keep, spec, servers, MEASURING, SETTING, pairs=8)
    assert order[3:9] == [("32", 0), ("16", 0), ("16", 1), ("32", 1), ("32", 2), ("16", 2)]
    assert {value: one.verdict for value, one in found.items()} == {"16": "PASS", "8": "FAIL"}
    assert SETTING in found["8"].notes[0]
