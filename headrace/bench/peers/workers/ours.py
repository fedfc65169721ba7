"""Headrace as a worker: the engine in this process (`engine`), or clients of a gateway (`pipeline HOST:PORT [MODEL]`).

Every item has a client of its own, as all are in the engine at once when it is alone. With the model's directory there
are 32 clients, who send text, which the pipeline has to tokenize.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
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
        target, text_of = arguments[1], _decoder(arguments[2]) if arguments[2:] else None

        def generate(items: Items) -> dict[str, Any]:
            clients = CLIENTS if text_of else len(items)
            return _told(asyncio.run(through.run(target, _workload(items), clients, text_of=text_of)))

        serve("Headrace, four processes and clients", generate)


def _decoder(model: str) -> through.TextOf:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def _workload(items: Items) -> Workload:
    return [[Item(tuple(prompt), output)] for prompt, output in items]


def _told(run: Run) -> dict[str, Any]:
    return {"seconds": run.seconds, "first_token_s": list(run.first_token_s)}


if __name__ == "__main__":
    main(sys.argv[1:])
