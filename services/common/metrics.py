"""The one file that touches prometheus_client: instruments by `metric_names`, an endpoint, a sampler. Knows no service.

Counting and observing is a dictionary look-up and an addition under a lock, 1 to 2 µs, from any thread; nothing waits
for a scrape. What only has a present value (memory, queue lengths, pressure) is read once a second by a thread of its
own (see `machine`). The endpoint answers on a thread too: OpenMetrics with exemplars where the scraper asks for it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from services.common import machine, metric_names
from services.common.metric_names import Metric

SAMPLE_EVERY_S = 1.0
MAX_LABEL_SETS = 200  # of one metric; what comes later is counted under OTHER
OTHER = "other"

Instrument = Counter | Gauge | Histogram


class Metrics:
    """The metrics of one process; those that it never touches are not there."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._families: dict[str, Instrument] = {}
        self._children: dict[tuple[str, tuple[str, ...]], Instrument] = {}
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}
        self._lock = threading.Lock()
        self._samplers: list[Callable[[], None]] = [lambda: machine.sample(self)]
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._server: WSGIServer | None = None

    # --- recording ------------------------------------------------------------------------------------

    def add(self, metric: Metric, amount: float = 1, *labels: str) -> None:
        """Counts; `labels` are values in the order of the metric's labels."""
        child = self._child(metric, labels)
        if isinstance(child, Counter):
            child.inc(max(0.0, amount))

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """Sets a gauge."""
        child = self._child(metric, labels)
        if isinstance(child, Gauge):
            child.set(value)

    def observe(self, metric: Metric, value: float, *labels: str, trace_id: str = "") -> None:
        """Puts a value into a histogram; the trace id becomes the bucket's exemplar."""
        child = self._child(metric, labels)
        if isinstance(child, Histogram):
            child.observe(value, {"trace_id": trace_id} if trace_id else None)

    def observe_many(self, metric: Metric, values: Iterable[float], *labels: str) -> None:
        """Puts many values into a histogram at once; 0.1 µs each."""
        child = self._child(metric, labels)
        if not isinstance(child, Histogram):
            return
        counts: dict[int, int] = {}
        total = 0.0
        for value in values:
            place = bisect_left(metric.buckets, value)
            counts[place] = counts.get(place, 0) + 1
            total += value
        child._sum.inc(total)  # noqa: SLF001 - the library has no call for this
        for place, count in counts.items():
            child._buckets[place].inc(count)  # noqa: SLF001

    def total(self, metric: Metric, value: float, *labels: str) -> None:
        """Brings a counter to a total that is kept elsewhere; a total that has fallen began anew."""
        key = (metric.name, labels)
        with self._lock:
            before = self._totals.get(key, 0.0)
            self._totals[key] = value
        self.add(metric, value - before if value >= before else value, *labels)

    def _child(self, metric: Metric, labels: tuple[str, ...]) -> Instrument:
        key = (metric.name, labels)
        child = self._children.get(key)
        return child if child is not None else self._make(metric, labels)

    def _make(self, metric: Metric, labels: tuple[str, ...]) -> Instrument:
        with self._lock:
            family = self._families.get(metric.name)
            if family is None:
                family = self._families[metric.name] = _instrument(metric, self._registry)
            if metric.labels and sum(name == metric.name for name, _ in self._children) >= MAX_LABEL_SETS:
                labels = tuple(OTHER for _ in labels)
            child = family.labels(*labels) if metric.labels else family
            self._children[metric.name, labels] = child
            return child

    # --- sampling and serving -------------------------------------------------------------------------

    def each_second(self, sampler: Callable[[], None]) -> None:
        """Has a function called once a second, on the sampler's thread; it must be quick and may read, not change."""
        self._samplers.append(sampler)

    def start(self, host: str, port: int, loop: asyncio.AbstractEventLoop) -> None:
        """Opens the endpoint on `host:port`, path /metrics, and starts sampling.

        Raises:
            OSError: the port is in use or the address is not ours.
        """
        self._server, serving = start_http_server(port, host.strip("[]"), self._registry)
        sampling = threading.Thread(target=self._sample_for_ever, args=(loop,), name="headrace-sampler", daemon=True)
        sampling.start()
        self._threads = [serving, sampling]

    def sample(self) -> None:
        """Reads everything that has a present value, once."""
        for sampler in list(self._samplers):
            sampler()

    def close(self) -> None:
        """Ends the endpoint and the sampler; at most a second."""
        self._stopping.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        for thread in self._threads:
            thread.join(0.5)

    def _sample_for_ever(self, loop: asyncio.AbstractEventLoop) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            self._probe(loop)
            self.sample()
            self._stopping.wait(max(0.1, SAMPLE_EVERY_S - (time.monotonic() - began)))

    def _probe(self, loop: asyncio.AbstractEventLoop) -> None:
        """How long the event loop takes to get to a call that is made now."""
        posted = time.monotonic()
        if not loop.is_closed():
            loop.call_soon_threadsafe(
                lambda: self.observe(metric_names.LOOP_LAG, time.monotonic() - posted),
            )


def _instrument(metric: Metric, registry: CollectorRegistry) -> Instrument:
    name, meaning, labels = metric.prometheus, metric.meaning, metric.labels
    if metric.kind == "counter":
        return Counter(name, meaning, labels, registry=registry)
    if metric.kind == "gauge":
        return Gauge(name, meaning, labels, registry=registry)
    return Histogram(name, meaning, labels, registry=registry, buckets=metric.buckets)
