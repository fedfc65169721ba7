"""The waiting line, and who is next.

Knows classes, time and token counts; nothing of blocks. Order (policies: bounded waiting, short uncached
work first, ageing):

1. requests that waited longer than their class's bound, longest waiting first;
2. then by class; inside a class preempted requests, then the highest response ratio,
   (time waited + time needed) / time needed, which favours short work and lets everything age.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.engine.request import Priority, Request

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class WaitingPolicy:
    """Numbers behind the order."""

    bound_ns: Mapping[Priority, int] = field(
        default_factory=lambda: {
            Priority.INTERACTIVE: 10 * _SECOND_NS,
            Priority.STANDARD: 10 * _SECOND_NS,
            Priority.BATCH: 60 * _SECOND_NS,
        }
    )
    """After this long a request goes first, and others are preempted before it."""
    token_service_ns: int = 1_000_000
    """Rough time to compute one uncached token; only ratios matter."""


class WaitingLine:
    """Requests that are not running, by id."""

    def __init__(self, policy: WaitingPolicy) -> None:
        self._policy = policy
        self._requests: dict[int, Request] = {}

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

    def in_order(self, now_ns: int) -> list[Request]:
        """Requests that may run, the next one first; those without credits are left out."""
        return sorted((r for r in self._requests.values() if not r.paused), key=lambda r: self._place(r, now_ns))

    def overdue(self, request: Request, now_ns: int) -> bool:
        """True when the request has waited longer than its class's bound."""
        return now_ns - _waiting_since(request) >= self._policy.bound_ns[request.priority]

    def _place(self, request: Request, now_ns: int) -> tuple[int, float, float, int, int]:
        since = _waiting_since(request)
        if self.overdue(request, now_ns):
            return (0, float(since), 0.0, 0, request.request_id)
        uncached = max(1, request.token_count - request.predicted_cached_count)
        service_ns = uncached * self._policy.token_service_ns
        ratio = (now_ns - since + service_ns) / service_ns
        rank = 2.0 * request.priority + (request.preempted_since_ns == 0)
        return (1, rank, -ratio, uncached, request.request_id)


def _waiting_since(request: Request) -> int:
    return request.preempted_since_ns or request.clock.arrival_ns
