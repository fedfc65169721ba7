"""One run, from the load to the report: client processes, the watch on the server, the analysis. Knows no command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from headrace import errors
from headrace.bench import analysis, fingerprint, server_watch
from headrace.bench.load import workers
from headrace.bench.load.spec import LoadSpec
from headrace.bench.load.workers import OnProgress, Where
from headrace.bench.metrics import Slo
from headrace.bench.records import Record
from headrace.bench.results import RunFailed
from headrace.bench.server_watch import ServerWatch


@dataclass(frozen=True)
class Server:
    """A server under test, and what is known of it beside its address."""

    where: Where
    configuration: Mapping[str, str] = field(default_factory=dict)  # settings that differ from the defaults
    pids: Mapping[str, int] = field(default_factory=dict)  # of its processes on this machine
    metrics: Sequence[str] = ()  # host:port of its Prometheus endpoints


@dataclass(frozen=True)
class Measuring:
    """How a run is measured."""

    slo: Slo
    processes: int  # clients
    fewest: int  # requests that each stage must measure


def run(
    spec: LoadSpec, server: Server, measuring: Measuring, progress: OnProgress = lambda _requests, _tokens: None
) -> tuple[dict[str, Any], list[Record]]:
    """Makes a load and returns the report with its records.

    Raises:
        RunFailed: the server cannot be reached, or a client process died.
    """
    where = server.where
    made = known(spec, server)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    with ServerWatch(where.address, where.any_key, server.pids, server.metrics) as watch:
        records, uses = workers.run(spec, where, measuring.processes, progress)
    start_s = watch.samples[0].at_s if watch.samples else 0.0
    samples = server_watch.as_json(watch.samples, start_s)
    evidence = analysis.Evidence(records, uses, samples, watch.counters, watch.cpu_s, watch.dropped_spans)
    report = analysis.report(spec, evidence, measuring.slo, measuring.fewest)
    return {"started_at": started_at, "fingerprint": made, **report, "samples": samples}, records


def known(spec: LoadSpec, server: Server) -> dict[str, Any]:
    """The fingerprint of a run with this load. Raises RunFailed: the server does not answer."""
    try:
        return fingerprint.make(spec, server.where.address, server.where.any_key, server.configuration)
    except errors.HeadraceError as error:
        raise RunFailed(f"{type(error).__name__}: {error.message}") from error
