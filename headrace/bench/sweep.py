"""The two sweeps: over the load, for the knee; over the values of one setting, in pairs of runs that take turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.bench import comparison, knee
from headrace.bench.comparison import Comparison
from headrace.bench.execute import Measuring, Server
from headrace.bench.kept_runs import Report, Runs
from headrace.bench.knee import Knee, NoKnee
from headrace.bench.load.spec import Leg, LoadSpec
from headrace.bench.metrics import Slo
from headrace.bench.results import RunFailed

# Short names of what is swept most; any variable of the services works.
SETTINGS: Mapping[str, str] = {
    "max_num_seqs": "HEADRACE_ENGINE_MAX_NUM_SEQS",
    "max_num_batched_tokens": "HEADRACE_ENGINE_MAX_NUM_BATCHED_TOKENS",
    "block_size": "HEADRACE_ENGINE_BLOCK_SIZE",
    "kv_memory_utilization": "HEADRACE_ENGINE_KV_MEMORY_UTILIZATION",
    "coalesce_tokens": "HEADRACE_STREAM_COALESCE_TOKENS",
    "coalesce_ms": "HEADRACE_STREAM_COALESCE_MS",
}
UNLOADED_REQUESTS, UNLOADED_RUNS = 30, 2
SLO_FACTOR = 3.0  # of the P95 of a server without load, where no objectives are given
LEAST_IN_FLIGHT = 0.5  # requests: below, a server is without load, and less load changes nothing
_UNSTEADY, _FEW = "not steady", "too few samples"
_SERVERS_FAULT = (_UNSTEADY, "failures")  # problems of a run that say that the level is too high
TRIES = 4  # of a probe or a pair with an invalid run: the machine may have been busy
# Seeds of what is not to share prompts: the second would find those of the first in the prefix cache.
_AGAIN_SEED, _WARM_UP_SEED = 1_000, 1_000_000


@dataclass
class KneeSweep:
    """Probes levels of load until the knee is found.

    Args:
        runs: makes them.
        spec: the load; its leg says how many requests a probe makes, and the level is the sweep's.
        server: whom it meets.
        measuring: how. Without objectives: `SLO_FACTOR` times the P95 of a server without load.
        budget_s: no repetition but the first begins that would probably not end within.
        clock: seconds.
    """

    runs: Runs
    spec: LoadSpec
    server: Server
    measuring: Measuring
    budget_s: float = math.inf
    clock: Callable[[], float] = time.monotonic
    unloaded: dict[str, float] = field(default_factory=dict)  # P95s, seconds, where they made the objectives
    probes: list[dict[str, Any]] = field(default_factory=list)  # level, kept, report of the leg

    def find(self, start: float, *, resolution: float, repeats: int) -> Knee:
        """Searches. Raises NoKnee, RunFailed."""
        begun_s = self.clock()
        if not self.measuring.slo.as_json():
            self.unloaded = self._unloaded()
            slo = Slo(**{name: SLO_FACTOR * value for name, value in self.unloaded.items()})
            self.measuring = replace(self.measuring, slo=slo)

        def go_on(done: int) -> bool:
            return (self.clock() - begun_s) * (done + 1) / done <= self.budget_s

        closed = self.spec.loop == "closed"
        return knee.find(self._probe, start, resolution=resolution, repeats=repeats, whole=closed, go_on=go_on)

    def in_flight(self, level: float) -> float:
        """Requests open at a level on average, from the nearest probe that kept the objectives."""
        kept = [one for one in self.probes if one["kept"]]
        nearest = min(kept, key=lambda one: abs(one["level"] - level))
        return float(nearest["figures"]["in_flight"]) * level / float(nearest["level"])

    def _probe(self, level: float, _repetition: int) -> bool:
        number = len(self.probes)
        for attempt in range(TRIES):
            leg = replace(self.spec.legs[0], level=level)
            spec = replace(self.spec, legs=(leg,), seed=self.spec.seed + number + _AGAIN_SEED * attempt)
            report = self._run(spec, self.measuring, "a probe for the knee")
            if not _not_the_servers(report):
                break
        else:
            raise RunFailed(f"at {level:g} the run is INVALID: {'; '.join(_not_the_servers(report))}")
        (found,) = report["legs"]
        kept = not found["problems"] and found["figures"]["slo_share"] >= knee.KEPT_SHARE
        self.probes.append({"level": level, "kept": kept, "problems": found["problems"], "figures": found["figures"]})
        in_flight = found["figures"]["in_flight"]
        if not kept and in_flight < LEAST_IN_FLIGHT:
            raise NoKnee(
                f"the objectives are lost even at {level:g}, where {in_flight:.2g} requests are open on average: "
                "they are too tight for this server, or something else uses its machine"
            )
        return kept

    def _run(self, spec: LoadSpec, measuring: Measuring, change: str) -> Report:
        before = self.runs.kept(spec, self.server, measuring, change)
        usable = before is not None and not _not_the_servers(before)
        return before if before is not None and usable else self.runs.make(spec, self.server, measuring, change)

    def _unloaded(self) -> dict[str, float]:
        """The lower P95s of two runs: what disturbs a server makes it slower, not faster."""
        measuring = replace(self.measuring, fewest=UNLOADED_REQUESTS // 2)
        leg = Leg(1, requests=UNLOADED_REQUESTS)
        found = []
        for number in range(UNLOADED_RUNS):
            seed = self.spec.seed + _WARM_UP_SEED + number
            alone = replace(self.spec, loop="closed", legs=(leg,), seed=seed)
            report = self._run(alone, measuring, "a server without load")
            figures = report["legs"][0]["figures"]
            if figures["ttft"]["p95"] is None:
                raise RunFailed(f"a server without load answers nothing: {'; '.join(report['problems'])}")
            found.append({name: figures[name]["p95"] for name in ("ttft", "tpot")})
        names = [name for name in found[0] if all(one[name] is not None for one in found)]
        return {name: min(one[name] for one in found) for name in names}


def vary(
    runs: Runs, spec: LoadSpec, servers: Mapping[str, Server], measuring: Measuring, setting: str, pairs: int
) -> dict[str, Comparison]:
    """Compares each value of a setting with the first, in the order A B B A A B B A ...

    Both sides of a pair get the same requests; each pair gets others, so that no prefix cache helps. A pair with an
    invalid run is made again, with other requests, `TRIES` times at most.

    Args:
        runs: makes them.
        spec: the load.
        servers: by value, all of them up; the first is the baseline.
        measuring: how.
        setting: the variable, as it is in the fingerprint.
        pairs: runs of each value.

    Raises:
        RunFailed: a run failed.
        comparison.Refused: a pair stayed invalid, or the servers differ in more than the setting.
    """
    baseline, *others = servers
    leg = Leg(1, requests=UNLOADED_REQUESTS)
    warm_up = replace(spec, legs=(leg,), loop="closed", seed=spec.seed + _WARM_UP_SEED)
    for value, server in servers.items():
        runs.make(warm_up, server, measuring, f"warm-up of {setting}={value}")
    found = {}
    for other in others:
        sides: dict[str, list[Report]] = {baseline: [], other: []}
        in_vain: list[str] = []
        for number in range(pairs):
            order = (baseline, other) if number % 2 == 0 else (other, baseline)
            of_pair = {value: servers[value] for value in order}
            made, again = _pair(runs, replace(spec, seed=spec.seed + number), of_pair, measuring, setting)
            in_vain += again
            for value in order:
                sides[value].append(made[value])
        compared = comparison.compare(sides[baseline], sides[other], changed=[setting])
        notes = [f"a pair was made again, {text}" for text in in_vain]
        found[other] = replace(compared, notes=[*compared.notes, *notes])
    return found


def _pair(
    runs: Runs, spec: LoadSpec, servers: Mapping[str, Server], measuring: Measuring, setting: str
) -> tuple[dict[str, Report], list[str]]:
    """Both runs of a pair by value, in the order of `servers`; and why earlier tries of it were in vain.

    Two runs are a pair because they follow one another, so one alone is not taken from the archive.
    """
    in_vain: list[str] = []
    while len(in_vain) < TRIES:
        of_try = replace(spec, seed=spec.seed + _AGAIN_SEED * len(in_vain))
        made = _kept_pair(runs, of_try, servers, measuring, setting) or {
            value: runs.make(of_try, server, measuring, f"{setting}={value}") for value, server in servers.items()
        }
        problems = [f"{setting}={value}: {text}" for value, report in made.items() for text in report["problems"]]
        if not problems:
            return made, in_vain
        in_vain.append("; ".join(problems))
    raise comparison.Refused(f"{TRIES} times in turn a run of a pair was INVALID; the last time, {in_vain[-1]}")


def _kept_pair(
    runs: Runs, spec: LoadSpec, servers: Mapping[str, Server], measuring: Measuring, setting: str
) -> dict[str, Report]:
    """Both runs, where both were made before and are valid."""
    before = {value: runs.kept(spec, server, measuring, f"{setting}={value}") for value, server in servers.items()}
    usable = {value: report for value, report in before.items() if report is not None and not report["problems"]}
    return usable if len(usable) == len(servers) else {}


def _not_the_servers(report: Report) -> list[str]:
    """Problems of a run that do not say that the level is too high."""
    problems = report["legs"][0]["problems"]
    unsteady = any(text.startswith(_UNSTEADY) for text in problems)  # then what is left can be few
    servers = (*_SERVERS_FAULT, *((_FEW,) if unsteady else ()))
    return [text for text in problems if not text.startswith(servers)]
