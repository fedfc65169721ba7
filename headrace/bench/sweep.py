"""The two sweeps: over the load, for the knee; over the values of one setting, in pairs of runs that take turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.bench import comparison, knee
from headrace.bench.comparison import Comparison
from headrace.bench.execute import Measuring, Server
from headrace.bench.knee import Knee
from headrace.bench.load.spec import Leg, LoadSpec
from headrace.bench.metrics import Slo
from headrace.bench.records import Record
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
UNLOADED_REQUESTS = 30
SLO_FACTOR = 3.0  # of the unloaded medians, where no objectives are given
_SERVERS_FAULT = ("not steady", "failures")  # problems of a run that say that the level is too high

Run = Callable[[LoadSpec, Server, Measuring], tuple[dict[str, Any], list[Record]]]
Keep = Callable[[Mapping[str, Any], Sequence[Record], str], dict[str, Any]]


@dataclass
class KneeSweep:
    """Probes levels of load until the knee is found.

    Args:
        run: makes one run.
        spec: the load; its leg says how many requests a probe makes, and the level is the sweep's.
        server: whom it meets.
        measuring: how. Without objectives: `SLO_FACTOR` times the medians of a server without load.
    """

    run: Run
    spec: LoadSpec
    server: Server
    measuring: Measuring
    probes: list[dict[str, Any]] = field(default_factory=list)  # level, kept, report of the leg

    def find(self, start: float, *, resolution: float, repeats: int) -> Knee:
        """Searches. Raises NoKnee, RunFailed."""
        if not self.measuring.slo.as_json():
            self.measuring = replace(self.measuring, slo=self._unloaded())
        closed = self.spec.loop == "closed"
        return knee.find(self._probe, start, resolution=resolution, repeats=repeats, whole=closed)

    def in_flight(self, level: float) -> float:
        """Requests open at a level on average, from the nearest probe that kept the objectives."""
        kept = [one for one in self.probes if one["kept"]]
        nearest = min(kept, key=lambda one: abs(one["level"] - level))
        return float(nearest["figures"]["in_flight"]) * level / float(nearest["level"])

    def _probe(self, level: float, seed: int) -> bool:
        leg = replace(self.spec.legs[0], level=level)
        spec = replace(self.spec, legs=(leg,), seed=self.spec.seed + 1000 * seed + len(self.probes))
        report, _ = self.run(spec, self.server, self.measuring)
        (found,) = report["legs"]
        ours = [text for text in found["problems"] if not text.startswith(_SERVERS_FAULT)]
        if ours:
            raise RunFailed(f"at {level:g} the run is INVALID: {'; '.join(ours)}")
        kept = not found["problems"] and found["figures"]["slo_share"] >= knee.KEPT_SHARE
        self.probes.append({"level": level, "kept": kept, "problems": found["problems"], "figures": found["figures"]})
        return kept

    def _unloaded(self) -> Slo:
        alone = replace(self.spec, loop="closed", legs=(Leg(1, requests=UNLOADED_REQUESTS),))
        report, _ = self.run(alone, self.server, replace(self.measuring, fewest=UNLOADED_REQUESTS // 2))
        figures = report["legs"][0]["figures"]
        ttft, tpot = figures["ttft"]["p50"], figures["tpot"]["p50"]
        if ttft is None:
            raise RunFailed(f"a server without load answers nothing: {'; '.join(report['problems'])}")
        return Slo(ttft=SLO_FACTOR * ttft, **({} if tpot is None else {"tpot": SLO_FACTOR * tpot}))


def vary(
    run: Run,
    keep: Keep,
    spec: LoadSpec,
    servers: Mapping[str, Server],
    measuring: Measuring,
    setting: str,
    pairs: int,
) -> dict[str, Comparison]:
    """Compares each value of a setting with the first, in the order A B B A A B B A ...

    Both sides of a pair get the same requests; each pair gets others, so that no prefix cache helps. All runs are kept.

    Args:
        run: makes one run.
        keep: archives it.
        spec: the load.
        servers: by value, all of them up; the first is the baseline.
        measuring: how.
        setting: the variable, as it is in the fingerprint.
        pairs: runs of each value.

    Raises:
        RunFailed: a run failed.
        comparison.Refused: a run was invalid, or the servers differ in more than the setting.
    """
    baseline, *others = servers
    warm_up = replace(spec, legs=(Leg(1, requests=UNLOADED_REQUESTS),), loop="closed", seed=spec.seed + pairs)
    for server in servers.values():
        run(warm_up, server, measuring)
    found = {}
    for other in others:
        sides: dict[str, list[dict[str, Any]]] = {baseline: [], other: []}
        for number in range(pairs):
            for value in (baseline, other) if number % 2 == 0 else (other, baseline):
                report, records = run(replace(spec, seed=spec.seed + number), servers[value], measuring)
                sides[value].append(keep(report, records, f"{setting}={value}"))
        found[other] = comparison.compare(sides[baseline], sides[other], changed=[setting])
    return found
