"""The runs of a sweep: each is archived as soon as it is made, and found there when the sweep is begun again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headrace.bench import archive, execute
from headrace.bench.archive import Intent
from headrace.bench.execute import Measuring, Server
from headrace.bench.load.spec import LoadSpec
from headrace.bench.load.workers import OnProgress

Report = dict[str, Any]


class Runs(Protocol):
    """What a sweep needs of whoever makes its runs; `change` is the run's intent."""

    def make(self, spec: LoadSpec, server: Server, measuring: Measuring, change: str) -> Report:
        """The report of a new run. Raises RunFailed."""

    def kept(self, spec: LoadSpec, server: Server, measuring: Measuring, change: str) -> Report | None:
        """The report of the last run like this one; None: it has to be made."""


@dataclass(frozen=True)
class KeptRuns:
    """Runs with an archive; see `Runs`.

    Args:
        place: the archive.
        resume: whether what it has is not made again.
        progress: told of requests and tokens of a run that is made.
    """

    place: Path
    resume: bool
    progress: OnProgress

    def make(self, spec: LoadSpec, server: Server, measuring: Measuring, change: str) -> Report:
        """See `Runs`. Raises ArchiveError, too."""
        report, records = execute.run(spec, server, measuring, self.progress)
        return archive.save(self.place, report, records, Intent(change))

    def kept(self, spec: LoadSpec, server: Server, measuring: Measuring, change: str) -> Report | None:
        """See `Runs`: one with the same intent, fingerprint, load and objectives. Raises ArchiveError, RunFailed."""
        if not self.resume:
            return None
        wanted = {"load": spec.as_json(), "slo_s": measuring.slo.as_json(), "fingerprint": execute.known(spec, server)}
        like = [one for one in archive.all_runs(self.place) if one["intent"]["change"] == change and _has(one, wanted)]
        return like[-1] if like else None


def _has(report: Report, wanted: Mapping[str, Any]) -> bool:
    """Whether a report has these values, in the form that JSON gives them."""
    return bool(json.loads(json.dumps(wanted)) == {name: report[name] for name in wanted})
