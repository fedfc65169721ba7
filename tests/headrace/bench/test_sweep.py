"""Guarantees of the sweeps, against servers in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.bench import analysis, archive, execute, sweep
from headrace.bench.analysis import Evidence
from headrace.bench.comparison import Refused
from headrace.bench.execute import Measuring, Server
from headrace.bench.kept_runs import KeptRuns, Report
from headrace.bench.knee import NoKnee
from headrace.bench.load.spec import Leg, LoadSpec
from headrace.bench.load.workers import ClientUse, Where
from headrace.bench.metrics import Slo
from headrace.bench.results import RunFailed
from tests.headrace.bench import runs
from tests.headrace.bench.virtual import Asked, drive

MEASURING = Measuring(Slo(), processes=1, fewest=20)
SETTING = "HEADRACE_ENGINE_MAX_NUM_SEQS"


def server(value: str = "") -> Server:
    return Server(Where("nowhere", {}, 1.0), {SETTING: value})


class Made:
    """Runs that a function makes, none of them kept before."""

    def __init__(self, make: Callable[[LoadSpec, Server, Measuring], Report]) -> None:
        self._make = make

    def make(self, spec: LoadSpec, one: Server, measuring: Measuring, change: str) -> Report:
        return {**self._make(spec, one, measuring), "intent": {"change": change}}

    def kept(self, _spec: LoadSpec, _server: Server, _measuring: Measuring, _change: str) -> None:
        return None


class Places:
    """A server with ten places of 100 ms: 100 requests a second are its limit."""

    def __init__(self) -> None:
        self.use = runs.IDLE
        self.burnt = 0  # so many of the next runs find no processor
        self.seeds: list[int] = []

    def __call__(self, spec: LoadSpec, _server: Server, measuring: Measuring) -> Report:
        self.seeds.append(spec.seed)
        use = replace(self.use, cpu_s=self.use.wall_s) if self.burnt else self.use
        self.burnt = max(0, self.burnt - 1)
        free = [0.0] * 10

        def script(asked: Asked) -> Sequence[tuple[float, int]]:
            place = free.index(min(free))
            begun = max(free[place], asked.now)
            free[place] = begun + 0.1
            return [(begun - asked.now + 0.05, 4), (0.05, 4)]

        records, _ = drive(spec, script)
        return analysis.report(spec, Evidence(records, [use]), measuring.slo, measuring.fewest)


def test_the_knee_of_a_server_with_ten_places() -> None:
    """Closed loop: with up to 20 clients nobody waits longer than one other request takes."""
    spec = LoadSpec("closed", (Leg(1, requests=200),), prompt="8", output="8")
    search = sweep.KneeSweep(Made(Places()), spec, server(), Measuring(Slo(ttft=0.17), processes=1, fewest=20))
    found = search.find(4, resolution=0.01, repeats=2)
    assert found.found == [20, 20]
    assert search.in_flight(20) == pytest.approx(20, rel=0.15)


def test_an_overloaded_open_loop_is_beyond_the_knee() -> None:
    """Its latency grows without end: not steady, which is an answer, not a failure of the run."""
    spec = LoadSpec("open", (Leg(1, requests=400),), prompt="8", output="8", arrivals="constant")
    search = sweep.KneeSweep(Made(Places()), spec, server(), MEASURING)
    found = search.find(20, resolution=0.05, repeats=1)
    assert search.measuring.slo.ttft == pytest.approx(0.15)  # three times that of the server without load
    assert 90 <= found.level.value <= 105
    assert found.recommended == pytest.approx(0.7 * found.level.value)


def test_an_overload_without_enough_steady_requests_is_beyond_the_knee() -> None:
    """A latency that only grows leaves half of the requests: too few are not the tool's fault then."""
    spec = LoadSpec("open", (Leg(1, requests=150),), prompt="8", output="8", arrivals="constant")
    measuring = Measuring(Slo(ttft=0.15), processes=1, fewest=100)
    search = sweep.KneeSweep(Made(Places()), spec, server(), measuring)
    assert search.find(50, resolution=0.05, repeats=1).level.value >= 90
    assert any("too few samples" in text for one in search.probes for text in one["problems"])


def test_a_tool_at_its_limit_finds_no_knee() -> None:
    """What it would find is its own."""
    places = Places()
    places.use = ClientUse(wall_s=1.0, cpu_s=0.99, lags_s=[0.0] * 10)
    spec = LoadSpec("closed", (Leg(1, requests=100),), prompt="8", output="8")
    measuring = Measuring(Slo(ttft=1.0), processes=1, fewest=20)
    with pytest.raises(RunFailed, match="INVALID: client CPU"):
        sweep.KneeSweep(Made(places), spec, server(), measuring).find(4, resolution=0.1, repeats=1)


def test_a_probe_that_the_machine_spoilt_is_made_again() -> None:
    """Not the whole sweep; and no two runs send the same prompts, which a prefix cache would know."""
    places = Places()
    places.burnt = sweep.TRIES - 1
    spec = LoadSpec("closed", (Leg(1, requests=200),), prompt="8", output="8")
    search = sweep.KneeSweep(Made(places), spec, server(), Measuring(Slo(ttft=0.17), processes=1, fewest=20))
    assert search.find(4, resolution=0.1, repeats=2).found == [20, 20]
    assert len(set(places.seeds)) == len(places.seeds) == len(search.probes) + sweep.TRIES - 1


def test_objectives_that_no_load_keeps_are_told_at_once() -> None:
    """At four requests a second a place is always free: half the load would take twice as long and change nothing."""
    places = Places()
    spec = LoadSpec("open", (Leg(1, requests=100),), prompt="8", output="8")
    search = sweep.KneeSweep(Made(places), spec, server(), Measuring(Slo(ttft=0.01), processes=1, fewest=20))
    with pytest.raises(NoKnee, match=r"lost even at 4, where 0\.\d+ requests are open"):
        search.find(4, resolution=0.1, repeats=3)
    assert len(places.seeds) == 1


def test_no_repetition_begins_that_would_not_end_within_the_budget() -> None:
    """Five probes of ten seconds a repetition: two fit, a third would not; the first is always made."""
    now = 0.0

    def timed(*what: Any) -> Report:
        nonlocal now
        now += 10.0
        return places(*what)

    places = Places()
    spec = LoadSpec("closed", (Leg(1, requests=200),), prompt="8", output="8")
    slo = Measuring(Slo(ttft=0.17), processes=1, fewest=20)
    for budget_s, repetitions in ((1.0, 1), (149.0, 2)):
        search = sweep.KneeSweep(Made(timed), spec, server(), slo, budget_s=budget_s, clock=lambda: now)
        assert len(search.find(16, resolution=0.1, repeats=20).found) == repetitions


def paired(draw: np.random.Generator, order: list[tuple[str, int]], factors: dict[str, float]) -> Any:
    """Makes runs of servers that take so many times as long."""

    def run(spec: LoadSpec, one: Server, _measuring: Measuring) -> Report:
        value = one.configuration[SETTING]
        order.append((value, spec.seed))
        mood = float(np.exp(draw.normal(0, 0.01)))
        return runs.run(len(order), spec.seed, factors[value] * mood, draw, configuration=dict(one.configuration))

    return run


def test_values_take_turns_and_are_compared_in_pairs() -> None:
    """A B B A ..., the same requests for both of a pair and others for the next; the slower value fails."""
    order: list[tuple[str, int]] = []
    run = paired(np.random.default_rng(0), order, {"32": 1.0, "16": 1.0, "8": 1.2})
    spec = LoadSpec("open", (Leg(5.0, requests=60),))
    servers = {value: server(value) for value in ("32", "16", "8")}
    found = sweep.vary(Made(run), spec, servers, MEASURING, SETTING, pairs=8)
    assert order[3:9] == [("32", 0), ("16", 0), ("16", 1), ("32", 1), ("32", 2), ("16", 2)]
    assert {value: one.verdict for value, one in found.items()} == {"16": "PASS", "8": "FAIL"}
    assert SETTING in found["8"].notes[0]


def test_a_pair_with_an_invalid_run_is_made_again_and_told() -> None:
    """With other requests, both runs of it; one that stays invalid ends the sweep, not after all the others."""
    order: list[tuple[str, int]] = []
    right = paired(np.random.default_rng(0), order, {"32": 1.0, "16": 1.0})

    def spoilt(spec: LoadSpec, one: Server, measuring: Measuring) -> Report:
        report = right(spec, one, measuring)
        return {**report, "problems": ["client lag: much"]} if len(order) in bad else report

    spec = LoadSpec("open", (Leg(5.0, requests=60),))
    servers = {value: server(value) for value in ("32", "16")}
    bad = {4}  # the second run of the first pair, after two of warm-up
    found = sweep.vary(Made(spoilt), spec, servers, MEASURING, SETTING, pairs=8)["16"]
    assert found.verdict == "PASS"
    assert found.notes[-1] == f"a pair was made again, {SETTING}=16: client lag: much"
    assert [seed for _, seed in order[2:8]] == [0, 0, 1000, 1000, 1, 1]
    order.clear()
    bad = set(range(3, 1000))
    with pytest.raises(Refused, match="client lag: much"):
        sweep.vary(Made(spoilt), spec, servers, MEASURING, SETTING, pairs=8)
    assert len(order) == 2 + 2 * sweep.TRIES


def test_an_interrupted_sweep_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the archive has is not made again, but for half a pair; without --resume everything is."""
    order: list[tuple[str, int]] = []
    run = paired(np.random.default_rng(0), order, {"32": 1.0, "16": 1.0})
    left = [9]  # runs until it is interrupted: two of warm-up, three pairs, and half a pair

    def make(spec: LoadSpec, one: Server, measuring: Measuring, _progress: Any) -> tuple[Report, list[Any]]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        report = {**run(spec, one, measuring), "load": spec.as_json()}
        return {name: value for name, value in report.items() if name not in ("format", "id", "intent")}, []

    def known(spec: LoadSpec, one: Server) -> dict[str, Any]:
        return {**runs.FINGERPRINT, "workload": {"digest": fingerprint_of(spec)}, "configuration": one.configuration}

    def fingerprint_of(spec: LoadSpec) -> str:
        return LoadSpec("open", (Leg(5.0, requests=runs.REQUESTS),), seed=spec.seed, prompt="8", output="8").digest

    monkeypatch.setattr(execute, "run", make)
    monkeypatch.setattr(execute, "known", known)
    spec = LoadSpec("open", (Leg(5.0, requests=60),))
    servers = {value: server(value) for value in ("32", "16")}

    def go(*, resume: bool) -> int:
        begun = len(order)
        kept = KeptRuns(tmp_path, resume, lambda _requests, _tokens: None)
        sweep.vary(kept, spec, servers, MEASURING, SETTING, pairs=6)
        return len(order) - begun

    with pytest.raises(KeyboardInterrupt):
        go(resume=False)
    left[0] = 1000
    assert go(resume=True) == 2 + 2 * 3
    assert go(resume=False) == 2 + 2 * 6
    assert len(archive.all_runs(tmp_path)) == 9 + 8 + 14
