"""Thousands of callers of one engine loop, who read, stall, cancel and run out of time at random."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from services.engine.engine import Engine
from services.engine.loop import EngineLoop
from services.engine.outputs import RequestOutput, StepOutput
from services.engine.request import UNLIMITED_CREDITS, Priority, Request, RequestRefused, SamplingParams

VOCABULARY = 97
WINDOW = 8  # credits that a reader has outstanding
MOST_OPEN = 48
HANG_S = 60.0


@dataclass
class Caller:
    """One request as its caller sees it."""

    request: Request
    max_tokens: int
    cancel_at: int | None  # output tokens after which it is cancelled; 0: while it waits
    reads: bool  # grants credits for what it has read
    opened_s: float = field(default_factory=time.monotonic)
    tokens: int = 0
    endings: int = 0


class Callers:
    """Opens requests and answers what the engine's thread publishes; `faults` says what went wrong."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.faults: list[str] = []
        self.endings: Counter[str] = Counter()
        self.token_count = 0
        self._draw = random.Random(seed)
        self._prefixes = [[self._draw.randrange(VOCABULARY) for _ in range(200)] for _ in range(6)]
        self._open: dict[int, Caller] = {}
        self._changed = threading.Condition()
        self._made = 0
        self.loop = EngineLoop(engine, publish=self._publish, refused=self._refused, fatal=self._fatal)
        self.loop.start()

    def run(self, count: int) -> None:
        """Open `count` requests, not too many at once, and wait until all have ended."""
        for _ in range(count):
            self._wait(MOST_OPEN - 1)
            self._open_one()
        self._wait(0)

    def _wait(self, most: int) -> None:
        """Until at most `most` are open; those whose reader has stopped are cancelled when nothing else is left."""
        begun = time.monotonic()
        with self._changed:
            while len(self._open) > most and not self.faults:
                if not self._changed.wait(0.2):
                    for caller in list(self._open.values()):
                        if not caller.reads:
                            self.loop.abort(caller.request.request_id)
                if time.monotonic() - begun > HANG_S:
                    self.faults.append(f"{len(self._open)} requests hang: {sorted(self._open)[:5]}")
        if self.faults:
            raise SystemExit("; ".join(self.faults[:5]))

    def _open_one(self) -> None:
        draw = self._draw
        self._made += 1
        reads = draw.random() < 0.95
        slow = not reads or draw.random() < 0.4
        prompt = [*draw.choice(self._prefixes)[: draw.randint(1, 200)], draw.randrange(VOCABULARY)]
        max_tokens = draw.randint(1, 48)
        request = Request(
            self._made,
            prompt,
            max_tokens=max_tokens,
            sampling=self._sampling(),
            ignore_eos=draw.random() < 0.5,
            priority=draw.choice(list(Priority)),
            cache_salt=draw.choice([b"a", b"b", b"c"]),
            credit_limit=WINDOW if slow else UNLIMITED_CREDITS,
            deadline_ns=time.monotonic_ns() + draw.randint(1, 400) * 1_000_000 if draw.random() < 0.15 else None,
        )
        cancel_at = draw.randint(0, 20) if draw.random() < 0.2 else None
        caller = Caller(request, max_tokens, cancel_at, reads)
        with self._changed:
            self._open[self._made] = caller
        self.loop.add(request)
        if cancel_at == 0:
            self.loop.abort(self._made)

    def _sampling(self) -> SamplingParams:
        draw = self._draw
        return SamplingParams(
            temperature=draw.choice([0.0, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            top_k=draw.choice([0, 20]),
            repetition_penalty=draw.choice([1.0, 1.2]),
            min_tokens=draw.choice([0, 1]),
            logprobs=draw.choice([None, None, 3]),
            prompt_logprobs=2 if draw.random() < 0.05 else None,
        )

    # --- on the engine's thread -----------------------------------------------------------------------

    def _publish(self, step: StepOutput) -> None:
        for output in step.outputs:
            self._take(output)

    def _take(self, output: RequestOutput) -> None:
        caller = self._open.get(output.request_id)
        if caller is None or caller.endings:
            self.faults.append(f"news of {output.request_id} after its ending")
            return
        caller.tokens += len(output.token_ids)
        self.token_count += len(output.token_ids)
        if caller.tokens > caller.max_tokens:
            self.faults.append(f"{output.request_id} has {caller.tokens} of {caller.max_tokens} tokens")
        if output.finish is not None:
            self._end(caller, output.finish.value)
        elif caller.cancel_at is not None and caller.tokens >= caller.cancel_at:
            self.loop.abort(output.request_id)
        elif caller.reads:
            self.loop.grant(output.request_id, len(output.token_ids))

    def _end(self, caller: Caller, ending: str) -> None:
        caller.endings += 1
        if ending == "error":
            self.faults.append(f"{caller.request.request_id} failed: {caller.request.error}")
        if ending == "length" and caller.tokens != caller.max_tokens:
            self.faults.append(f"{caller.request.request_id} ended with {caller.tokens} of {caller.max_tokens}")
        with self._changed:
            self.endings[ending] += 1
            del self._open[caller.request.request_id]
            self._changed.notify()

    def _refused(self, request_id: int, refusal: RequestRefused) -> None:
        self.faults.append(f"{request_id} was refused: {refusal}")

    def _fatal(self, error: BaseException) -> None:
        self.faults.append(f"the engine died: {type(error).__name__}: {error}")
