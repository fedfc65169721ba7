"""How many requests are inside at once, and who is next. Knows nothing of what they ask, and no gRPC.

Inside there are so many places; what comes when they are taken waits, if it can be served in time, in a queue for each
priority that is bounded. The one idea: the tenant is next that was given the fewest tokens for its weight (see
`services.common.fairness`), so a tenant that floods waits for itself. A full queue gives up the last request of whoever
holds most of it, rather than refuse who holds less.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace.errors import DeadlineExceeded, HeadraceError, Reason, ResourceExhausted
from headrace.v1.generation_pb2 import PRIORITY_BATCH, PRIORITY_STANDARD, Priority
from services.common.fairness import FairClock
from services.gateway.identity import ANONYMOUS_TENANT

RETRY_AFTER_S = 1.0
PATIENCE_S: dict[int, float] = {PRIORITY_STANDARD: 10.0, PRIORITY_BATCH: 60.0}  # who has waited longer is overdue
MEMORY = 0.1  # share of the newest request in mean times


@dataclass(frozen=True, slots=True)
class Claim:
    """What a request is to admission.

    Attributes:
        tenant: whose it is.
        weight: its tenant's share, beside others'.
        priority: of `Priority`; lower goes first.
        cost: tokens that it is expected to use.
        deadline_ns: monotonic; None without one.
    """

    tenant: str = ANONYMOUS_TENANT
    weight: float = 1.0
    priority: int = PRIORITY_STANDARD
    cost: float = 1.0
    deadline_ns: int | None = None


@dataclass(slots=True, eq=False)
class _Waiter:
    claim: Claim
    arrived_ns: int
    called: asyncio.Future[None] = field(repr=False)


class Admission:
    """Places and queues.

    Args:
        max_open_requests: most places.
        max_queued_requests: most that wait, of each priority; 0: what finds no place is refused at once.
        capacity: places that the engines make sense of just now; 0: no other bound.
        sequences: that the engines run at once; what is inside beyond them waits there. 0: not known.
        now: monotonic nanoseconds.
    """

    def __init__(
        self,
        max_open_requests: int,
        max_queued_requests: int = 0,
        capacity: Callable[[], int] = lambda: 0,
        sequences: Callable[[], int] = lambda: 0,
        now: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.limit, self._max_queued = max_open_requests, max_queued_requests
        self._capacity, self._sequences, self._now = capacity, sequences, now
        self._open: Counter[tuple[str, int]] = Counter()  # requests inside, by tenant and priority
        self._waiting: list[_Waiter] = []  # in order of arrival
        self._fair: FairClock[str] = FairClock()
        self._overdue_had_last_place = False
        self._service_s: float | None = None  # mean time that a request is inside
        self._queued_s = 0.0  # mean time that a request waited in its engine

    @property
    def open_count(self) -> int:
        """Requests inside."""
        return self._open.total()

    @property
    def places(self) -> int:
        """Most requests inside at once, just now."""
        return max(1, min(self.limit, self._capacity() or self.limit))

    @property
    def queued_count(self) -> int:
        """Requests that wait for a place."""
        return len(self._waiting)

    def queued(self, priority: int) -> int:
        """Requests of a priority that wait."""
        return sum(waiter.claim.priority == priority for waiter in self._waiting)

    @asynccontextmanager
    async def admit(self, claim: Claim = Claim()) -> AsyncIterator[int]:
        """Holds a place; yields how many requests were inside before.

        Raises:
            ResourceExhausted: there is no place, and no use in waiting.
            DeadlineExceeded: the deadline came first.
        """
        before, wait_s = self.open_count, self._expected_wait_s(claim)
        self._check_deadline(claim, wait_s)
        if before >= self.places or self._waiting:
            await self._wait(claim, wait_s)
        else:
            self._enter(claim)
        began_ns = self._now()
        try:
            yield before
        finally:
            took_s = (self._now() - began_ns) / 1e9
            mean_s = took_s if self._service_s is None else self._service_s
            self._service_s = mean_s + MEMORY * (took_s - mean_s)
            self._exit(claim)

    def used(self, claim: Claim, tokens: int, queued_s: float | None = None) -> None:
        """A request has ended: its tenant was given what it used, not what was expected.

        Args:
            claim: of the request.
            tokens: that were computed for it.
            queued_s: seconds that it waited in its engine; None where that is not known.
        """
        self._fair.give(claim.tenant, tokens - claim.cost, claim.weight)
        if queued_s is not None:
            self._queued_s += MEMORY * (queued_s - self._queued_s)

    def _enter(self, claim: Claim) -> None:
        self._open[claim.tenant, claim.priority] += 1
        self._fair.turn(claim.tenant)
        self._fair.give(claim.tenant, claim.cost, claim.weight)

    def _exit(self, claim: Claim) -> None:
        self._open[claim.tenant, claim.priority] -= 1
        if not self._open[claim.tenant, claim.priority]:
            del self._open[claim.tenant, claim.priority]
        self._call()

    def _check_deadline(self, claim: Claim, wait_s: float) -> None:
        if wait_s and claim.deadline_ns is not None and self._now() + int(wait_s * 1e9) >= claim.deadline_ns:
            left_s = max(0.0, (claim.deadline_ns - self._now()) / 1e9)
            raise ResourceExhausted(
                f"{left_s:.2f} s are left until the deadline, and {wait_s:.2f} s of waiting are ahead of it",
                reason=Reason.DEADLINE_UNREACHABLE,
                retry_after_s=wait_s,
            )

    async def _wait(self, claim: Claim, wait_s: float) -> None:
        if self.queued(claim.priority) >= self._max_queued:
            self._make_room(claim, wait_s)
        waiter = _Waiter(claim, self._now(), asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._call()
        try:
            left_ns = None if claim.deadline_ns is None else max(0, claim.deadline_ns - self._now())
            async with asyncio.timeout(None if left_ns is None else left_ns / 1e9):
                await waiter.called
        except TimeoutError:
            self._leave(waiter)
            raise DeadlineExceeded("the deadline has passed while the request waited for a place") from None
        except BaseException:
            self._leave(waiter)
            raise

    def _leave(self, waiter: _Waiter) -> None:
        """A waiter gives up; a place that it was given in the same moment goes to the next."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        elif waiter.called.done() and not waiter.called.cancelled() and waiter.called.exception() is None:
            self._exit(waiter.claim)

    def _make_room(self, claim: Claim, wait_s: float) -> None:
        """Gives up the last waiter of the tenant that holds most of a full queue, or refuses the newcomer."""
        queue = [waiter for waiter in self._waiting if waiter.claim.priority == claim.priority]
        held = Counter(waiter.claim.tenant for waiter in queue)
        weights = {waiter.claim.tenant: waiter.claim.weight for waiter in queue}
        largest = max(held, key=lambda tenant: held[tenant] / weights[tenant], default=claim.tenant)
        refusal = self._full(claim.priority, wait_s)
        if largest == claim.tenant or held[largest] / weights[largest] <= (held[claim.tenant] + 1) / claim.weight:
            raise refusal
        last = [waiter for waiter in queue if waiter.claim.tenant == largest][-1]
        self._waiting.remove(last)
        if not last.called.done():
            last.called.set_exception(refusal)

    def _full(self, priority: int, wait_s: float) -> HeadraceError:
        name = Priority.Name(priority).removeprefix("PRIORITY_") if priority in Priority.values() else str(priority)
        return ResourceExhausted(
            f"{self.open_count} requests are open and {self.queued(priority)} of priority {name} wait, "
            "the most that are taken; retry later",
            retry_after_s=max(0.1, wait_s) if self._service_s is not None else RETRY_AFTER_S,
        )

    def _expected_wait_s(self, claim: Claim) -> float:
        """Until an engine can begin it: from the mean time inside, and how many must end before.

        For a place, those are who will be called before it. In the engines they are its own tenant's beyond the
        sequences that run there, since who else waits there may be passed; but no more than was waited there of late,
        since who is inside may be paused and in nobody's way.
        """
        inside, sequences = self.open_count, self._sequences()
        for_a_place = self._ahead(claim) + 1 if inside >= self.places or self._waiting else 0
        own = sum(self._open[claim.tenant, priority] for priority in range(claim.priority + 1))
        for_an_engine = max(0, own + 1 - sequences) if sequences else 0
        each_s = (self._service_s or 0.0) / max(1, inside)
        return for_a_place * each_s + min(for_an_engine * each_s, self._queued_s)

    def _ahead(self, claim: Claim) -> int:
        """How many that wait will be called before a newcomer."""
        clocks: dict[str, float] = {}
        turns = []
        for waiting in (*(waiter.claim for waiter in self._waiting), claim):
            clock = clocks.get(waiting.tenant, self._fair.at(waiting.tenant))
            turns.append((waiting.priority, clock))
            clocks[waiting.tenant] = clock + waiting.cost / waiting.weight
        return sum(turn <= turns[-1] for turn in turns[:-1])

    def _call(self) -> None:
        """Lets in who is next, while there are places."""
        while self._waiting and self.open_count < self.places:
            waiter = self._next()
            self._waiting.remove(waiter)
            if not waiter.called.done():
                self._enter(waiter.claim)
                waiter.called.set_result(None)

    def _next(self) -> _Waiter:
        """Whose turn it is. Of the overdue the first that came, but while others wait too, they take turns with it."""
        now_ns = self._now()
        overdue = [waiter for waiter in self._waiting if _overdue(waiter, now_ns)]
        others = [waiter for waiter in self._waiting if not _overdue(waiter, now_ns)]
        self._overdue_had_last_place = bool(overdue) and not (others and self._overdue_had_last_place)
        if self._overdue_had_last_place:
            return overdue[0]
        return min(others, key=lambda waiter: (waiter.claim.priority, self._fair.at(waiter.claim.tenant)))


def _overdue(waiter: _Waiter, now_ns: int) -> bool:
    return (now_ns - waiter.arrived_ns) / 1e9 > PATIENCE_S.get(waiter.claim.priority, float("inf"))
