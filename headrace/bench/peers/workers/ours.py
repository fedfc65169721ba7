"""Headrace as a worker: the engine in this process (`engine`), or clients of a gateway (`pipeline HOST:PORT`)."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

from headrace.bench import through
from headrace.bench.in_process import EngineBench
from headrace.bench.peers.workers.serving import Items, serve
from headrace.bench.results import Run
from headrace.bench.workloads import Item, Workload

CLIENTS = 32


def main(arguments: list[str]) -> None:
    """Loads, then answers."""
    if arguments[0] == "engine":
        bench = EngineBench(os.environ)
        serve("Headrace", lambda items: _told(bench.run(_workload(items), empty=False)))
    else:
        target = arguments[1]

        def generate(items: Items) -> dict[str, Any]:
            return _told(asyncio.run(through.run(target, _workload(items), CLIENTS)))

        serve("Headrace, four processes and 32 clients", generate)


def _workload(items: Items) -> Workload:
    return [[Item(tuple(prompt), output)] for prompt, output in items]


def _told(run: Run) -> dict[str, Any]:
    return {"seconds": run.seconds, "first_token_s": list(run.first_token_s)}


if __name__ == "__main__":
    main(sys.argv[1:])
