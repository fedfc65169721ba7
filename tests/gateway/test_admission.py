"""Who gets in, who waits, and who is next; time is a number that the test moves."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from headrace import errors
from headrace.v1.generation_pb2 import PRIORITY_BATCH, PRIORITY_INTERACTIVE, PRIORITY_STANDARD
from services.gateway.admission import Admission, Claim

SECOND = 10**9


class Clock:
    """Nanoseconds that only the test moves."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


class Door:
    """An admission, and those that came: `order` has them as they were let in."""

    def __init__(self, places: int, queue: int = 100, sequences: int = 0) -> None:
        self.clock = Clock()
        self.admission = Admission(places, queue, sequences=lambda: sequences, now=self.clock)
        self.order: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, **claim) -> asyncio.Task[None]:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._visit(name, Claim(**claim)))
        await settle()
        return self.tasks[name]

    async def _visit(self, name: str, claim: Claim) -> None:
        async with self.admission.admit(claim):
            self.order.append(name)
            await self.ends[name].wait()

    async def leave(self, name: str) -> None:
        self.ends[name].set()
        await self.tasks[name]
        await settle()

    async def leave_all(self) -> None:
        """Each one leaves as soon as it is in, until nobody waits."""
        while self.admission.open_count:
            await self.leave(next(name for name in self.order if not self.tasks[name].done()))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_places_are_bounded_and_come_back():
    """The bound is exact; a refusal says when to retry; a place comes back however its holder ends."""
    admission = Admission(2)
    async with admission.admit() as before, admission.admit():
        assert before == 0
        with pytest.raises(errors.ResourceExhausted) as caught:
            async with admission.admit():
                pass
        assert caught.value.retry_after_s
    with pytest.raises(KeyError):
        async with admission.admit():
            raise KeyError
    assert admission.open_count == 0


async def test_who_floods_waits_for_itself():
    """One request of a quiet tenant is next, whoever came before; by cost, and by weight."""
    door = Door(1)
    for number in range(20):
        await door.come(f"flood{number}", tenant="flood", cost=100)
    await door.come("quiet0", tenant="quiet", cost=100)
    await door.come("quiet1", tenant="quiet", cost=100)
    await door.leave_all()
    assert door.order.index("quiet0") <= 2
    assert door.order.index("quiet1") <= 4
    assert len(door.order) == 22


async def test_shares_follow_weights_and_costs():
    """Two tenants that always wait: tokens are shared as their weights are."""
    door = Door(1)
    for number in range(40):
        await door.come(f"a{number}", tenant="a", cost=50, weight=3)
        await door.come(f"b{number}", tenant="b", cost=50, weight=1)
    for _ in range(41):
        await door.leave(door.order[-1])
    first = door.order[:40]
    assert 28 <= sum(name.startswith("a") for name in first) <= 32
    await door.leave_all()


async def test_priorities_and_the_end_of_patience():
    """Interactive before standard before batch; who has waited beyond its bound goes first."""
    door = Door(1)
    await door.come("inside")
    await door.come("batch", priority=PRIORITY_BATCH)
    await door.come("standard", priority=PRIORITY_STANDARD)
    await door.come("interactive", priority=PRIORITY_INTERACTIVE)
    await door.leave("inside")
    assert door.order[-1] == "interactive"
    door.clock.ns += 61 * SECOND
    await door.come("late", priority=PRIORITY_INTERACTIVE)
    await door.leave("interactive")
    assert door.order[-1] == "batch"
    await door.leave_all()


async def test_a_flood_that_is_overdue_leaves_every_second_place():
    """A tenant that has waited too long behind itself does not keep another waiting for all of it."""
    door = Door(1)
    await door.come("inside")
    for number in range(20):
        await door.come(f"flood{number}", tenant="flood")
    door.clock.ns += 11 * SECOND
    for number in range(3):
        await door.come(f"quiet{number}", tenant="quiet")
    await door.leave_all()
    assert door.order[1:7] == ["flood0", "quiet0", "flood1", "quiet1", "flood2", "quiet2"]


async def test_what_cannot_be_in_time_is_refused_at_once():
    """From measured times: refused with the numbers, and with when there will be room."""
    door = Door(1)
    await door.come("first")
    door.clock.ns += 4 * SECOND
    await door.leave("first")
    await door.come("second")
    with pytest.raises(errors.ResourceExhausted, match=r"4\.00 s of waiting") as caught:
        await (await door.come("hurried", deadline_ns=door.clock.ns + 3 * SECOND))
    assert caught.value.reason == "DEADLINE_UNREACHABLE"
    assert caught.value.retry_after_s == pytest.approx(4)
    patient = await door.come("patient", deadline_ns=door.clock.ns + 5 * SECOND)
    assert not patient.done()
    await door.leave("second")
    await door.leave("patient")


async def test_what_would_wait_in_the_engines_counts():
    """Places are free, sequences are not: who cannot wait for one to end is refused, and who need not is not.

    Nobody is, while nobody has waited in an engine: those inside may all be paused.
    """
    door = Door(10, sequences=2)
    await door.come("first")
    door.clock.ns += 4 * SECOND
    await door.leave("first")
    for number in range(4):
        await door.come(f"paused{number}", tenant="flood")
    assert not (await door.come("in time", tenant="flood", deadline_ns=door.clock.ns + SECOND)).done()
    await door.leave_all()
    door.admission = Admission(10, sequences=lambda: 2, now=door.clock)
    await door.come("again")
    door.clock.ns += 4 * SECOND
    await door.leave("again")
    for _ in range(30):
        door.admission.used(Claim(), 1, queued_s=10.0)
    for number in range(4):
        await door.come(f"flood{number}", tenant="flood", deadline_ns=door.clock.ns + 60 * SECOND)
    with pytest.raises(errors.ResourceExhausted, match=r"3\.00 s of waiting"):  # three must end, of four in 4 s
        await (await door.come("hurried", tenant="flood", deadline_ns=door.clock.ns + 2 * SECOND))
    quiet = await door.come("quiet", tenant="quiet", deadline_ns=door.clock.ns + 2 * SECOND)
    assert not quiet.done()
    await door.leave_all()
    assert door.order[-1] == "quiet"


async def test_a_flood_does_not_make_others_late():
    """Who will be called next is not refused because many of another tenant came before."""
    door = Door(1)
    await door.come("first")
    door.clock.ns += SECOND
    await door.leave("first")
    for number in range(20):
        await door.come(f"flood{number}", tenant="flood", cost=100)
    quiet = await door.come("quiet", tenant="quiet", cost=100, deadline_ns=door.clock.ns + 3 * SECOND)
    assert not quiet.done()
    with pytest.raises(errors.ResourceExhausted):
        await (await door.come("late", tenant="flood", cost=100, deadline_ns=door.clock.ns + 3 * SECOND))
    await door.leave_all()
    assert door.order.index("quiet") <= 2


async def test_a_tenant_is_charged_what_it_used():
    """Not what its request was expected to cost: one that ended early comes again as if it had asked for less."""
    door = Door(1)
    await door.come("inside")
    for number in range(3):
        await door.come(f"a{number}", tenant="a", cost=1000)
        await door.come(f"b{number}", tenant="b", cost=300)
    for _ in range(6):
        await door.leave(door.order[-1])
        if door.order[-1].startswith("a"):
            door.admission.used(Claim("a", cost=1000), 100)
    assert door.order[1:] == ["a0", "b0", "a1", "a2", "b1", "b2"]
    await door.leave_all()


async def test_a_full_queue_gives_up_the_largest_share():
    """A newcomer with less in the queue takes the place of the flood's last; the flood's own newcomer is refused."""
    door = Door(1, queue=4)
    await door.come("inside", tenant="flood")
    for number in range(4):
        await door.come(f"flood{number}", tenant="flood")
    with pytest.raises(errors.ResourceExhausted):
        await (await door.come("more", tenant="flood"))
    await door.come("quiet", tenant="quiet")
    with pytest.raises(errors.ResourceExhausted):
        await door.tasks["flood3"]
    assert door.admission.queued(PRIORITY_STANDARD) == 4
    await door.leave_all()
    assert "quiet" in door.order


async def test_who_leaves_the_queue_leaves_nothing():
    """Cancelled at any point, also in the moment of being called: places and queue are as if it had never been."""
    door = Door(1)
    await door.come("inside")
    waiters = [await door.come(f"w{number}") for number in range(10)]
    for waiter in waiters[::2]:
        waiter.cancel()
    door.ends["inside"].set()
    await asyncio.sleep(0)
    waiters[1].cancel()
    await asyncio.gather(*waiters[:2], return_exceptions=True)
    for waiter in waiters[::2]:
        with contextlib.suppress(asyncio.CancelledError):
            await waiter
    await settle()
    await door.leave_all()
    assert door.admission.open_count == 0
    assert door.admission.queued(PRIORITY_STANDARD) == 0


async def test_places_follow_the_engines():
    """As many as the engines make sense of, never more than the bound."""
    capacity = [8]
    admission = Admission(10, 0, lambda: capacity[0])
    assert admission.places == 8
    capacity[0] = 80
    assert admission.places == 10
