"""Who is waiting, running or ended, and how a request passes from one to the other.

Knows requests, their blocks, credits, deadlines and clocks; nothing of budgets or of who should go next.

    add ─► waiting ─► start ─► running ─► end ─► ended ─► take_ended
              ▲                   │        ▲
              └───── preempt ◄────┘        │
              └──────── end (abort, deadline)

Invariants: every request that has not ended is either waiting or running; a waiting one holds no blocks; only
``release`` frees blocks; each request is handed out by ``take_ended`` exactly once.
"""

from __future__ import annotations

import heapq

from services.engine.block_pool import BlockPool
from services.engine.request import Away, FinishReason, Interval, PreemptReason, QueueReason, Request, RequestStatus
from services.engine.waiting import WaitingLine, WaitingPolicy


class Roster:
    """Every request of the engine and its state."""

    def __init__(self, pool: BlockPool, policy: WaitingPolicy) -> None:
        self.waiting = WaitingLine(policy)
        self.preemption_count = 0
        self._pool = pool
        self._requests: dict[int, Request] = {}  # all that have not ended
        self._running: dict[int, Request] = {}
        self._ended: list[Request] = []
        self._deadlines: list[tuple[int, int]] = []

    # --- facts ----------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        """Requests that hold blocks, paused ones too, in order of admission; a copy."""
        return list(self._running.values())

    @property
    def running_count(self) -> int:
        """Requests that hold blocks and have credits."""
        return len(self._running) - sum(r.paused for r in self._running.values())

    @property
    def waiting_count(self) -> int:
        """Requests in line, with credits."""
        return len(self.waiting) - sum(r.paused for r in self.waiting)

    @property
    def paused_count(self) -> int:
        """Requests without credits, in whatever state."""
        return sum(r.paused for r in self._requests.values())

    @property
    def backlog_token_count(self) -> int:
        """Known tokens of requests in line that are not computed."""
        return sum(r.pending_count for r in self.waiting)

    @property
    def has_requests(self) -> bool:
        """True while any request has not ended, or an ending has not been taken."""
        return bool(self._requests or self._ended)

    @property
    def runnable(self) -> bool:
        """True when a step has something to do now."""
        return bool(self._ended) or any(not r.paused for r in self._requests.values())

    @property
    def next_deadline_ns(self) -> int | None:
        """The earliest deadline among requests that have not ended."""
        while self._deadlines and self._deadlines[0][1] not in self._requests:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def wasted_token_count(self, block_size: int) -> int:
        """Places in the last blocks of running requests that are not needed yet."""
        return sum(max(0, len(r.block_table) * block_size - r.token_count) for r in self._running.values())

    def running_by_id(self, request_id: int) -> Request:
        """A running request."""
        return self._running[request_id]

    # --- passages -------------------------------------------------------------------------------------

    def add(self, request: Request, now: int) -> None:
        """Let a request wait. Raises KeyError when its id is in use."""
        if request.request_id in self._requests:
            raise KeyError(request.request_id)
        if request.clock.arrival_ns == 0:
            request.clock.arrival_ns = now
        if request.paused:
            request.clock.queue_reason = QueueReason.CREDITS
        self._requests[request.request_id] = request
        self.waiting.put(request)
        if request.deadline_ns is not None:
            heapq.heappush(self._deadlines, (request.deadline_ns, request.request_id))

    def start(self, request: Request, now: int) -> None:
        """Waiting → running; its block table and computed count are set."""
        self.waiting.start(request, now)
        self._running[request.request_id] = request
        request.status = RequestStatus.RUNNING
        clock = request.clock
        if request.preempted_since_ns:
            _end_preemption(request, now, max(0, request.lost_count - request.computed_count))
        else:
            clock.first_scheduled_ns = now
            clock.cached_token_count = request.computed_count

    def preempt(self, request: Request, reason: PreemptReason, now: int) -> None:
        """Running → waiting: blocks go (and stay cached while they can), tokens stay."""
        self.release(request)
        request.lost_count = request.computed_count
        request.computed_count = 0
        request.status = RequestStatus.WAITING
        request.preempted_since_ns = now
        request.preempt_reason = reason
        request.clock.preemption_count += 1
        self.preemption_count += 1
        del self._running[request.request_id]
        self.waiting.put(request)

    def grant(self, request_id: int, token_count: int, now: int) -> None:
        """Allow more output tokens; a no-op for a request that has ended."""
        request = self._requests.get(request_id)
        if request is None or token_count <= 0:
            return
        request.credit_limit += token_count
        if not request.paused:
            _end_pause(request, now)

    def end(self, request: Request, reason: FinishReason, now: int) -> None:
        """Any state → ended. Its blocks stay until ``release``."""
        _end_pause(request, now)
        if request.preempted_since_ns:
            _end_preemption(request, now, 0)
        if request.status is RequestStatus.WAITING:
            self.waiting.remove(request)
        else:
            del self._running[request.request_id]
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish = reason
        request.clock.finished_ns = now
        self._ended.append(request)

    def abort(self, request_id: int, now: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a request between steps, in whatever state; False when it has ended or never was."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self.end(request, reason, now)
        self.release(request)
        return True

    def abort_all(self, now: int) -> None:
        """End every request as CANCELLED."""
        for request_id in list(self._requests):
            self.abort(request_id, now)

    def expire(self, now: int) -> None:
        """End requests whose deadline has passed, waiting ones before they cost anything."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_ns, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.deadline_ns == deadline_ns:
                self.abort(request_id, now, FinishReason.DEADLINE_EXCEEDED)

    def take_ended(self) -> list[Request]:
        """Requests that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def release(self, request: Request) -> None:
        """Give the request's blocks back, tails first, so that heads of chains stay cached longest."""
        self._pool.release(reversed(request.block_table.view.tolist()))
        request.block_table.clear()

    def check_integrity(self) -> None:
        """Hold the pool's invariants, and that references equal what block tables say.

        Raises:
            AssertionError: naming the first invariant broken.
        """
        self._pool.check_integrity()
        counts = [0] * (self._pool.block_count + 1)
        for request in self._requests.values():
            for block in request.block_table.view.tolist():
                counts[block] += 1
        if counts != self._pool.reference_counts():
            raise AssertionError("references differ from what the block tables hold")
        if len(self.waiting) + len(self._running) != len(self._requests):
            raise AssertionError("a request is neither waiting nor running, or both")
        for request in self.waiting:
            if len(request.block_table) or request.computed_count:
                raise AssertionError(f"waiting request {request.request_id} holds blocks")


def _end_pause(request: Request, now: int) -> None:
    """Account for the time without credits; a preempted request waits for its turn from here on."""
    if request.paused_since_ns:
        request.clock.was_away(Interval(Away.PAUSED, request.paused_since_ns, now))
        request.paused_since_ns = 0
        if request.preempted_since_ns:
            request.preempted_since_ns = now


def _end_preemption(request: Request, now: int, recomputed_count: int) -> None:
    """Account for the time without blocks, and for the tokens that are computed again."""
    interval = Interval(
        Away.PREEMPTED, request.preempted_since_ns, now, request.preempt_reason, recomputed_token_count=recomputed_count
    )
    request.clock.was_away(interval)
    request.preempted_since_ns = 0
