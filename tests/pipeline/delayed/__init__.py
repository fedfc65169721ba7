"""A service with a delay in one stage, for tests alone: `python -m tests.pipeline.delayed.engine`.

The file that DELAYS_FILE names says which stage now, and how many seconds: `prefill 0.05`. Nothing of this is in the
services: their functions are wrapped here, before the process is started.
"""

from __future__ import annotations

import functools
import os
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

STAGES = ("admit", "tokenize", "route", "transit", "queue", "prefill", "first_delivery", "decode", "tail")


def run(service: str) -> None:
    """Wraps the service's functions and runs it."""
    _WRAP[service]()
    runpy.run_module(f"services.{service}", run_name="__main__")


def pause(stage: str) -> None:
    """Blocks for as long as the file says, if it names the stage."""
    words = Path(os.environ["DELAYS_FILE"]).read_text().split()
    if words and words[0] == stage:
        time.sleep(float(words[1]))


def _before(owner: Any, name: str, stage: str, when: Callable[..., bool] = lambda *_: True) -> None:
    """Has a method pause before it does its work, where `when` says so of its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if when(*arguments):
            pause(stage)
        return original(*arguments, **named)

    setattr(owner, name, wrapped)


def _gateway() -> None:
    from services.gateway import peers, validation
    from services.gateway.router import Router

    _before(validation, "check_generation", "admit")
    _before(Router, "choose", "route")
    _before(peers, "_headers", "transit", lambda span: "Encode" in span.name)


def _tokenizer() -> None:
    from services.tokenizer.vocabulary import Vocabulary

    _before(Vocabulary, "encode_texts", "tokenize")


def _engine() -> None:
    from services.engine.loop import EngineLoop
    from services.engine.runner import ModelRunner

    _before(EngineLoop, "_add", "queue")
    _before(ModelRunner, "launch", "prefill", lambda _, step: step.prefill_token_count > 0)
    _before(ModelRunner, "launch", "decode", lambda _, step: any(r.output_count == 3 for r in step.requests))


def _stream() -> None:
    from services.stream.delivery import Delivery
    from services.stream.relay import Relay

    _before(Relay, "push", "first_delivery", lambda relay, *_: not relay.statistics.first_token_ns)
    _before(Delivery, "final", "tail")


_WRAP = {"gateway": _gateway, "tokenizer": _tokenizer, "engine": _engine, "stream": _stream}
