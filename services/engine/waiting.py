"""The waiting line, and who is next.

Knows classes, time and token counts; nothing of blocks. Order (policies: bounded waiting, fair shares, short uncached
work first, ageing):

1. overdue requests, which waited longer than their class's bound, longest overdue first. While others wait too,
   every second place is theirs, so that a flood of a lower class does not starve a higher one;
2. then by class; inside a class preempted requests, then the fair key that was given the fewest tokens for its weight,
   what goes before in the line counted in;
3. of one key the highest response ratio, (time waited + time needed) / time needed, which favours short work and lets
   everything age.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING

from services.common.fairness import FairClock
from services.engine.request import Priority, Request

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class WaitingPolicy:
    """Numbers behind the order."""

    bound_ns: Mapping[Priority, int] = field(
        default_factory=lambda: {
            Priority.STANDARD: 10 * _SECOND_NS,
            Priority.BATCH: 60 * _SECOND_NS,
        }
    )
    """After this long a request goes first, and others are preempted before it. A class that is not here goes before
    the others anyway."""
    token_service_ns: int = 1_000_000
    """Rough time to compute one uncached token; only ratios matter."""


class WaitingLine:
    """Requests that are not running, by id."""

    def __init__(self, policy: WaitingPolicy) -> None:
        self.fair: FairClock[bytes] = FairClock()
        self._policy = policy
        self._requests: dict[int, Request] = {}
        self._overdue_had_last_place = False

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def put(self, request: Request) -> None:
        """Let a request wait."""
        self._requests[request.request_id] = request

    def remove(self, request: Request) -> None:
        """Take a request out."""
        del self._requests[request.request_id]

    def start(self, request: Request, now_ns: int) -> None:
        """Take a request out, whose turn it is; what it has to compute is its key's, once."""
        self._overdue_had_last_place = self.overdue(request, now_ns)
        self.fair.turn(request.fair_key)
        if not request.preempted_since_ns:
            self.fair.give(request.fair_key, request.pending_count, request.fair_weight)
        self.remove(request)

    def in_order(self, now_ns: int) -> list[Request]:
        """Requests that may run, the next one first; those without credits are left out."""
        overdue: list[Request] = []
        others: list[Request] = []
        for request in self._requests.values():
            if not request.paused:
                (overdue if self.overdue(request, now_ns) else others).append(request)
        others = self._by_turns(others, now_ns)
        if not overdue:
            return others
        overdue.sort(key=lambda r: (_waiting_since(r) + self._policy.bound_ns[r.priority], r.request_id))
        turns = (others, overdue) if self._overdue_had_last_place else (overdue, others)
        return [request for pair in zip_longest(*turns) for request in pair if request is not None]

    def overdue(self, request: Request, now_ns: int) -> bool:
        """True when the request has waited longer than its class's bound."""
        bound_ns = self._policy.bound_ns.get(request.priority)
        return bound_ns is not None and now_ns - _waiting_since(request) >= bound_ns

    def _by_turns(self, requests: list[Request], now_ns: int) -> list[Request]:
        """Requests as their keys take turns."""
        requests.sort(key=lambda r: self._place(r, now_ns))
        clocks: dict[bytes, float] = {}
        turns: dict[int, tuple[int, float]] = {}
        for request in requests:
            clock = clocks.get(request.fair_key, self.fair.at(request.fair_key))
            turns[request.request_id] = (_rank(request), clock)
            clocks[request.fair_key] = clock + request.uncached_count / request.fair_weight
        if len(clocks) > 1:
            requests.sort(key=lambda r: turns[r.request_id])
        return requests

    def _place(self, request: Request, now_ns: int) -> tuple[int, float, int, int]:
        uncached = request.uncached_count
        service_ns = uncached * self._policy.token_service_ns
        ratio = (now_ns - _waiting_since(request) + service_ns) / service_ns
        return (_rank(request), -ratio, uncached, request.request_id)


def _rank(request: Request) -> int:
    """By class, and preempted requests first."""
    return 2 * request.priority + (request.preempted_since_ns == 0)


def _waiting_since(request: Request) -> int:
    return request.preempted_since_ns or request.clock.arrival_ns
