"""A sweep as it is seen while it goes on: which run of how many it is at, and how long the rest takes."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.cli import output

if TYPE_CHECKING:
    from headrace.bench.execute import Measuring, Server
    from headrace.bench.kept_runs import KeptRuns, Report
    from headrace.bench.load.spec import LoadSpec


class Course:
    """A sweep's runs, one after the other.

    Args:
        arguments: of the command.
        show: of `output.progress`.
        expected: runs, about.
        about: of a run, in words.
    """

    def __init__(
        self, arguments: argparse.Namespace, show: Any, expected: int, about: Callable[[LoadSpec, Server], str]
    ) -> None:
        from headrace.bench import archive, kept_runs

        place = arguments.archive or archive.directory()
        self._runs: KeptRuns = kept_runs.KeptRuns(place, arguments.resume, self._progress)
        self._show, self._expected, self._about = show, expected, about
        self._live = output.stderr().is_terminal  # a log gets one line a run
        self._text = ""
        self._kept = 0
        self._took_s: list[float] = []

    def make(self, spec: LoadSpec, server: Server, measuring: Measuring, change: str) -> Report:
        """See `kept_runs.Runs`."""
        done = len(self._took_s) + self._kept
        expected = max(self._expected, done + 1)
        self._text = f"run {done + 1} of about {expected}: {self._about(spec, server)}"
        if self._took_s:
            self._text += f"; about {_for_people(statistics.median(self._took_s) * (expected - done))} left"
        self._tell(self._text)
        begun_s = time.monotonic()
        report = self._runs.make(spec, server, measuring, change)
        self._took_s.append(time.monotonic() - begun_s)
        return report

    def kept(self, spec: LoadSpec, server: Server, measuring: Measuring, change: str) -> Report | None:
        """See `kept_runs.Runs`."""
        report = self._runs.kept(spec, server, measuring, change)
        self._kept += report is not None
        return report

    def _progress(self, requests: int, _tokens: int) -> None:
        if self._live:
            self._tell(f"{self._text}; {requests} requests")

    def _tell(self, text: str) -> None:
        done = len(self._took_s) + self._kept
        self._show(text, done / max(self._expected, done + 1))


def _for_people(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"
