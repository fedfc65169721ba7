"""Makes requests when they are due, or as soon as a client is free, and records what comes. Knows no transport.

All times come from the event loop's own clock. Nothing is worked out while the load runs: a record is raw times.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from headrace.bench.load.spec import Conversation, LoadSpec, Turn
from headrace.bench.load.target import RequestFailed, Stream, Target
from headrace.bench.records import CANCELLED, OK, Record

LAG_PERIOD_S = 0.02
_Due = tuple[int, float, Conversation]  # leg, seconds after the start, what


class Driver:
    """One client process' part of a run.

    Args:
        spec: the load of the whole run.
        target: where it goes; connected.
        client: number of this process.
        clients: processes together: this one makes each `clients`-th conversation.
        done: called after each request.
    """

    def __init__(
        self,
        spec: LoadSpec,
        target: Target,
        client: int = 0,
        clients: int = 1,
        done: Callable[[Record], None] = lambda _record: None,
    ) -> None:
        self.records: list[Record] = []
        self.lags_s: list[float] = []  # how late the event loop was, every `LAG_PERIOD_S`
        self._spec, self._target, self._done = spec, target, done
        self._client, self._clients = client, clients
        self._start = 0.0
        self._clock = asyncio.get_running_loop().time
        # An open loop's requests are made before it begins, a closed loop's when they are needed.
        self._due = list(self._mine()) if spec.loop == "open" else []

    async def run(self, start: float) -> None:
        """Makes all requests and waits for their ends. Args: start: when it begins, on the event loop's clock."""
        self._start = start
        watching = asyncio.create_task(self._watch_lag())
        try:
            await (self._open_loop() if self._spec.loop == "open" else self._closed_loop())
        finally:
            watching.cancel()

    async def _open_loop(self) -> None:
        async with asyncio.TaskGroup() as group:
            for leg, due_s, conversation in self._due:
                wait_s = due_s - self._now()
                if wait_s > 0:
                    await asyncio.sleep(wait_s)
                group.create_task(self._converse(conversation, leg, due_s))

    async def _closed_loop(self) -> None:
        """Leg after leg; each begins when the one before has had its answers."""
        await asyncio.sleep(max(0.0, -self._now()))
        numbers = itertools.count(self._client, self._clients)
        for number, leg in enumerate(self._spec.legs):
            end_s = None if leg.seconds is None else self._now() + leg.seconds
            supply = numbers if leg.requests is None else itertools.islice(numbers, self._share(leg.requests))
            async with asyncio.TaskGroup() as group:
                for _ in range(self._share(int(leg.level))):
                    group.create_task(self._work(supply, number, end_s))

    async def _work(self, supply: Iterator[int], leg: int, end_s: float | None) -> None:
        """One client of a closed loop."""
        while end_s is None or self._now() < end_s:
            number = next(supply, None)
            if number is None:
                return
            await self._converse(self._spec.conversation(number), leg, self._now())

    async def _converse(self, conversation: Conversation, leg: int, due_s: float) -> None:
        """Turn after turn, until one is cancelled or fails."""
        history: list[int] = []
        for number, turn in enumerate(conversation.turns):
            if number:
                await asyncio.sleep(conversation.think_s)
                due_s += conversation.think_s
            history += turn.token_ids
            record = Record(
                conversation.number,
                turn=number,
                leg=leg,
                client=self._client,
                priority=conversation.priority,
                tenant=conversation.tenant,
                slow_reader=turn.pause_s > 0,
                planned_output=turn.output,
                prompt_tokens=len(history),
                intended_s=due_s,
            )
            history += await self._ask(turn, history, conversation, record)
            self.records.append(record)
            self._done(record)
            if record.outcome != OK:
                return
            due_s = record.ended_s

    async def _ask(self, turn: Turn, prompt: Sequence[int], conversation: Conversation, record: Record) -> list[int]:
        """One request; returns the ids of its answer where it is not the last turn."""
        record.sent_s = self._now()
        stream = self._target.open(turn, prompt, conversation)
        try:
            record.outcome = await self._read(stream, turn, record)
        except RequestFailed as failure:
            record.outcome, record.error = failure.code, str(failure)
        except asyncio.CancelledError:
            stream.cancel()
            raise
        record.ended_s = self._now()
        if record.outcome == OK:
            stream.finish(record)
        else:
            record.output_tokens = record.received_tokens
        return stream.token_ids

    async def _read(self, stream: Stream, turn: Turn, record: Record) -> str:
        tokens = 0
        while (count := await stream.read()) is not None:
            if not count:
                continue
            record.messages.append((self._now(), count))
            tokens += count
            if turn.cancel_after and tokens >= turn.cancel_after:
                stream.cancel()
                return CANCELLED
            if turn.pause_s:
                await asyncio.sleep(turn.pause_s)
        return OK

    async def _watch_lag(self) -> None:
        while True:
            due = self._clock() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self.lags_s.append(self._clock() - due)

    def _now(self) -> float:
        return self._clock() - self._start

    def _mine(self) -> Iterable[_Due]:
        for number, (leg, due_s) in enumerate(self._spec.due()):
            if number % self._clients == self._client:
                yield leg, due_s, self._spec.conversation(number)

    def _share(self, whole: int) -> int:
        """This process' part of a number of clients or requests."""
        return whole // self._clients + (self._client < whole % self._clients)
