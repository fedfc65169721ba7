"""Virtual time: an event loop whose clock jumps to the next timer, and a target that answers by script."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from headrace.bench.load.driver import Driver
from headrace.bench.load.spec import Conversation, LoadSpec, Turn
from headrace.bench.load.target import RequestFailed
from headrace.bench.records import Record

Script = Callable[["Asked"], Sequence[tuple[float, int]]]


class _Jump(selectors.SelectSelector):
    """Does not wait: it moves the clock on by what it should have waited."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now


class Asked:
    """What a script decides by: the request, and when it came."""

    def __init__(self, turn: Turn, token_ids: Sequence[int], conversation: Conversation, now: float) -> None:
        self.turn, self.token_ids, self.conversation, self.now = turn, tuple(token_ids), conversation, now


class ScriptedTarget:
    """Answers each request with the script's (seconds after the one before, tokens) messages.

    A message of -1 tokens fails the request.
    """

    def __init__(self, script: Script) -> None:
        self.asked: list[Asked] = []
        self.cancelled = 0
        self._script = script

    def open(self, turn: Turn, token_ids: Sequence[int], conversation: Conversation) -> _Stream:
        now = asyncio.get_running_loop().time()
        self.asked.append(Asked(turn, token_ids, conversation, now))
        return _Stream(self, self._script(self.asked[-1]), len(token_ids))


class _Stream:
    def __init__(self, target: ScriptedTarget, messages: Sequence[tuple[float, int]], prompt: int) -> None:
        self._target, self._left, self._prompt = target, list(messages), prompt
        self._due = asyncio.get_running_loop().time()
        self.token_ids: list[int] = []

    async def read(self) -> int | None:
        if not self._left:
            return None
        after, count = self._left.pop(0)
        self._due += after
        await asyncio.sleep(self._due - asyncio.get_running_loop().time())
        if count < 0:
            raise RequestFailed("Unavailable", "as the script says")
        self.token_ids += range(count)
        return count

    def finish(self, record: Record) -> None:
        record.prompt_tokens, record.output_tokens = self._prompt, len(self.token_ids)

    def cancel(self) -> None:
        self._target.cancelled += 1


def drive(spec: LoadSpec, script: Script) -> tuple[list[Record], ScriptedTarget]:
    """A run in virtual time; records in the order of sending."""
    target = ScriptedTarget(script)

    async def go() -> list[Record]:
        driver = Driver(spec, target)  # type: ignore[arg-type]
        await driver.run(asyncio.get_running_loop().time())
        return sorted(driver.records, key=lambda record: record.sent_s)

    return run(go()), target


def run(main: Coroutine[Any, Any, Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
