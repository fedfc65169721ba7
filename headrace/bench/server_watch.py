"""What the server says of itself while a run goes on: engine counters, its processes' memory and CPU, lost spans."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace import errors
from headrace.bench.hops import cpu_s
from headrace.sync_client import Client
from headrace.v1 import engine_pb2

COUNTERS = ("step_count", "prefilled_token_count", "decoded_token_count", "preemption_count")
DROPPED_SPANS = "headrace_spans_dropped_total"
PERIOD_S = 1.0
TIMEOUT_S = 5.0


@dataclass
class Sample:
    """The server at one moment."""

    at_s: float  # on the monotonic clock
    engine: dict[str, int]  # `EngineStats` by name, summed over the engines
    rss_bytes: dict[str, int] = field(default_factory=dict)  # by process, where they are known


class ServerWatch:
    """Samples a server once a second, on a thread, for as long as the `with` block lasts.

    A server that does not answer leaves no sample; that is the run's to say.

    Args:
        target: host:port of the gateway.
        api_key: for its GetStats.
        pids: process ids by name, of processes on this machine.
        metrics: host:port of Prometheus endpoints.
    """

    def __init__(self, target: str, api_key: str | None, pids: Mapping[str, int], metrics: Sequence[str] = ()) -> None:
        self.samples: list[Sample] = []
        self.dropped_spans: float | None = None
        self.cpu_s: dict[str, float] = {}  # of the named processes, from start to end
        self._client = Client(target, api_key=api_key)
        self._pids, self._metrics = pids, metrics
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="server-watch", daemon=True)
        self._dropped_before: float | None = None
        self._cpu_before: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._dropped_before = self._dropped()
        self._cpu_before = self._cpu()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        after_s = self._cpu()
        self.cpu_s = {name: after_s[name] - before for name, before in self._cpu_before.items() if name in after_s}
        self._ended.set()
        self._thread.join()
        self._sample()
        self._client.close()
        after = self._dropped()
        if after is not None and self._dropped_before is not None:
            self.dropped_spans = after - self._dropped_before

    @property
    def counters(self) -> dict[str, int]:
        """How much each of `COUNTERS` grew between the first and the last sample; nothing where there are no two."""
        if len(self.samples) < 2:
            return {}
        first, last = self.samples[0].engine, self.samples[-1].engine
        return {name: last[name] - first[name] for name in COUNTERS}

    def _watch(self) -> None:
        self._sample()
        while not self._ended.wait(PERIOD_S):
            self._sample()

    def _sample(self) -> None:
        with contextlib.suppress(errors.HeadraceError):
            stats = self._client.get_stats(timeout=TIMEOUT_S)
            names = [one.name for one in engine_pb2.EngineStats.DESCRIPTOR.fields]
            summed = {name: sum(getattr(engine.stats, name) for engine in stats.engines) for name in names}
            self.samples.append(Sample(time.monotonic(), summed, self._rss()))

    def _cpu(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, pid in self._pids.items():
            with contextlib.suppress(OSError):
                found |= cpu_s({name: pid})
        return found

    def _rss(self) -> dict[str, int]:
        found = {}
        for name, pid in self._pids.items():
            with contextlib.suppress(OSError, StopIteration):
                lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
                line = next(line for line in lines if line.startswith("VmRSS:"))
                found[name] = int(line.split()[1]) * 1024
        return found

    def _dropped(self) -> float | None:
        """Spans dropped so far, over all endpoints; None where one does not say."""
        if not self._metrics:
            return None
        total = 0.0
        for address in self._metrics:
            try:
                with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
                    total += _total(answer.read().decode())
            except OSError:
                return None
        return total


def _total(text: str) -> float:
    """Sum over the series of the counter in an exposition."""
    lines = (line.split(" # ")[0].split() for line in text.splitlines() if line.startswith(DROPPED_SPANS))
    return sum(float(parts[1]) for parts in lines)


def as_json(samples: Sequence[Sample], start_s: float) -> list[dict[str, Any]]:
    """Samples with seconds after the start."""
    return [{"at_s": one.at_s - start_s, "engine": one.engine, "rss_bytes": one.rss_bytes} for one in samples]
