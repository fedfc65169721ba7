"""Guarantees of the watch on the server: counters as they grew, memory, lost spans."""

from __future__ import annotations

import asyncio
import http.server
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.bench import server_watch
from headrace.bench.server_watch import ServerWatch
from tests.headrace.scripted_gateway import ScriptedGateway, serving

EXPOSITION = """# TYPE headrace_spans_dropped_total counter
headrace_spans_dropped_total{{process="gateway"}} {0}
headrace_spans_dropped_total{{process="engine"}} 2.0 # {{trace_id="1"}} 1.0
headrace_spans_exported_total 900.0
"""


@contextmanager
def metrics(values: Iterator[float]) -> Iterator[str]:
    """An endpoint that says the next value each time."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = EXPOSITION.format(next(values)).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_run_is_watched_from_its_start_to_its_end() -> None:
    """At least two samples, memory of the named processes, and how many spans were lost meanwhile."""

    def watch(target: str, endpoint: str) -> ServerWatch:
        with ServerWatch(target, None, {"bench": os.getpid(), "gone": 2**22}, [endpoint]) as watching:
            pass
        return watching

    async with serving(ScriptedGateway()) as target:
        with metrics(iter([3.0, 8.0])) as endpoint:
            found = await asyncio.to_thread(watch, target, endpoint)
    assert found.dropped_spans == 5.0
    assert found.cpu_s.keys() == {"bench"}
    assert found.cpu_s["bench"] > 0
    assert len(found.samples) >= 2
    assert found.counters == dict.fromkeys(server_watch.COUNTERS, 0)
    (first, *_) = server_watch.as_json(found.samples, found.samples[0].at_s)
    assert first["at_s"] == 0.0
    assert first["engine"]["kv_free_block_count"] == 4
    assert first["rss_bytes"].keys() == {"bench"}
    assert first["rss_bytes"]["bench"] > 1 << 20


async def test_a_server_that_says_nothing_leaves_nothing() -> None:
    """No sample, no counter, and dropped spans are unknown, which is not none."""

    def watch(target: str) -> ServerWatch:
        with ServerWatch(target, None, {}, ["127.0.0.1:1"]) as watching:
            pass
        return watching

    async with serving(ScriptedGateway()) as target:
        pass
    found = await asyncio.to_thread(watch, target)
    assert (found.samples, found.counters, found.dropped_spans) == ([], {}, None)
