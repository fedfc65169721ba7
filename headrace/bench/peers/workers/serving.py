"""The worker's end of the pipe: one JSON line in, one out. Imports nothing but the standard library.

A worker of another engine runs as a script under that engine's Python. Answers leave by a pipe of their own, so that
whatever an engine prints is not taken for one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

ANSWERS_FD = "HEADRACE_ANSWERS_FD"  # environment variable: the number of the pipe's file descriptor

Items = list[tuple[list[int], int]]  # prompt ids, and how many tokens to generate after them


def serve(version: str, generate: Callable[[Items], dict[str, Any] | None]) -> None:
    """Generates until the pipe closes.

    Args:
        version: what is measured, in words.
        generate: generates all of it greedily, whatever the tokens are; returns what there is to say beside the
            seconds, if anything.
    """

    def generated(items: Items) -> dict[str, Any]:
        begun = time.perf_counter()
        more = generate(items)
        seconds = time.perf_counter() - begun
        return {"seconds": seconds, "tokens": sum(count for _, count in items), **(more or {})}

    answer(version, generated)


def answer(version: str, respond: Callable[[Any], dict[str, Any]]) -> None:
    """Says what it is, and then answers each line until the pipe closes."""
    with os.fdopen(int(os.environ[ANSWERS_FD]), "w") as answers:

        def tell(message: dict[str, Any]) -> None:
            answers.write(json.dumps(message) + "\n")
            answers.flush()

        tell({"ready": version})
        for line in sys.stdin:
            tell(respond(json.loads(line)))


def check_length(made: int, wanted: int) -> None:
    """Raises RuntimeError: an engine stopped early."""
    if made != wanted:
        raise RuntimeError(f"{made} tokens came instead of {wanted}")
