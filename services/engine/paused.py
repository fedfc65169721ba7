"""Takes blocks from requests that their readers hold up. Knows the roster and counts of blocks."""

from __future__ import annotations

from collections import defaultdict

from services.engine.block_pool import BlockPool
from services.engine.request import PreemptReason, Request
from services.engine.roster import Roster


def preempt_paused(roster: Roster, pool: BlockPool, block_count: int, since_ns: int, now: int) -> None:
    """Preempt requests paused since before ``since_ns``, longest first, until ``block_count`` are regained."""
    before = pool.used_count
    for request in _longest_first(roster):
        if request.paused_since_ns > since_ns or before - pool.used_count >= block_count:
            break
        roster.preempt(request, PreemptReason.PAUSED, now)


def preempt_paused_over(roster: Roster, most: int, now: int) -> None:
    """Preempt paused requests, longest first, until those under one salt hold at most ``most`` blocks.

    A block that several of them hold counts once.
    """
    by_salt: defaultdict[bytes, list[Request]] = defaultdict(list)
    for request in _longest_first(roster):
        by_salt[request.cache_salt].append(request)
    for requests in by_salt.values():
        if sum(len(r.block_table) for r in requests) <= most:
            continue
        for place, request in enumerate(requests):
            if len({block for r in requests[place:] for block in r.block_table.view.tolist()}) <= most:
                break
            roster.preempt(request, PreemptReason.SHARE, now)


def _longest_first(roster: Roster) -> list[Request]:
    return sorted((r for r in roster.running if r.paused), key=lambda r: r.paused_since_ns)
