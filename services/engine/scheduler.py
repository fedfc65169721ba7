"""Decides what each step computes.

Knows requests, blocks and the clock; nothing of tensors, text or the wire.

The one idea: there is no prefill phase and no decode phase, only computed tokens catching up with known
tokens under a token budget a step. A chunk of a prompt, one decoded token, a prefix hit and the recomputation
after a preemption are the same thing with different counts. A request without credits is not scheduled.

Invariants: only ``commit`` advances a request (admission starts it at what the cache holds); only ``release``
frees blocks; the first request in rank order is never preempted, so at least one always advances.
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.engine.block_pool import BlockPool
from services.engine.plan import PlannedSequence, Sampled, StepPlan, build_plan
from services.engine.prefix_cache import PrefixCache
from services.engine.request import FinishReason, QueueReason, Request, RequestStatus
from services.engine.waiting import WaitingLine, WaitingPolicy

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of a step and of admission."""

    block_size: int = 16
    max_num_seqs: int = 32
    """Sequences a step; paused ones do not count."""
    max_num_batched_tokens: int = 512
    """Tokens a step."""
    max_chunk_tokens: int = 512
    """Tokens of one prompt a step."""
    watermark: float = 0.85
    """Share of the pool that may be referenced after an admission."""
    max_preemptions: int = 3
    """After this many a request is preempted only when no other can be."""
    paused_grace_ns: int = 1_000_000_000
    """A paused request keeps its blocks this long when others wait for room."""
    waiting: WaitingPolicy = field(default_factory=WaitingPolicy)


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan and whose it is."""

    plan: StepPlan
    requests: list[Request]
    """[S] the plan's sequences."""
    counts: list[int]
    """[S] tokens of each."""
    sampled: list[Request]
    """[L] requests that get a token after the step, in the order of the plan's logit rows."""
    decode_token_count: int
    """Tokens of requests that had caught up but for their last token."""
    started_ns: int

    @property
    def prefill_token_count(self) -> int:
        """Tokens of prompts and recomputation."""
        return self.plan.token_count - self.decode_token_count


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    preemption_count: int = 0
    prefilled_token_count: int = 0
    decoded_token_count: int = 0
    step_count: int = 0


@dataclass(slots=True)
class _Shares:
    """The token budget of one step, handed out."""

    budget: int
    counts: dict[int, int] = field(default_factory=dict)
    """By request id."""

    def give(self, request: Request, count: int) -> None:
        self.counts[request.request_id] = count
        self.budget -= count

    def take_back(self, request: Request) -> None:
        self.budget += self.counts.pop(request.request_id, 0)


class Scheduler:
    """Continuous batching with chunked prefill, prefix reuse, preemption, credits and deadlines."""

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        cache: PrefixCache,
        eos_token_ids: frozenset[int] = frozenset(),
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.config = config
        self.counters = SchedulerCounters()
        self._pool = pool
        self._cache = cache
        self._eos = eos_token_ids
        self._clock = clock
        self._requests: dict[int, Request] = {}  # every request that has not ended
        self._waiting = WaitingLine(config.waiting)
        self._running: dict[int, Request] = {}
        self._ended: list[Request] = []
        self._deadlines: list[tuple[int, int]] = []

    # --- what happens between steps -------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Let a checked request wait. Raises KeyError when its id is in use."""
        if request.request_id in self._requests:
            raise KeyError(request.request_id)
        if request.clock.arrival_ns == 0:
            request.clock.arrival_ns = self._clock()
        request.predicted_cached_count = len(self._cache.find(request)) * self.config.block_size
        if request.paused:
            request.clock.queue_reason = QueueReason.CREDITS
        self._requests[request.request_id] = request
        self._waiting.put(request)
        if request.deadline_ns is not None:
            heapq.heappush(self._deadlines, (request.deadline_ns, request.request_id))

    def grant(self, request_id: int, token_count: int) -> None:
        """Allow more output tokens; a no-op for a request that has ended."""
        request = self._requests.get(request_id)
        if request is None or token_count <= 0:
            return
        request.credit_limit += token_count
        if not request.paused:
            self._end_pause(request, self._clock())

    def abort(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """End a request in whatever state it is; False when it has ended or never was."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._end(request, reason, self._clock())
        self.release(request)
        return True

    def abort_all(self) -> None:
        """End every request as CANCELLED."""
        for request_id in list(self._requests):
            self.abort(request_id)

    # --- one step -------------------------------------------------------------------------------------

    def schedule(self) -> ScheduledStep | None:
        """Choose the next step's tokens; None when nothing can be computed now."""
        now = self._clock()
        self._expire(now)
        shares = _Shares(self.config.max_num_batched_tokens)
        if not self._share_with_running(shares, now):
            self._admit(shares, now)
        if not shares.counts:
            return None
        return self._write_plan(shares, now)

    def commit(self, step: ScheduledStep, sampled: list[Sampled]) -> None:
        """Advance every request of a step that was computed; ``sampled`` answers ``step.sampled``."""
        now = self._clock()
        step_ns = now - step.started_ns
        self.counters.step_count += 1
        self.counters.decoded_token_count += len(sampled)
        self.counters.prefilled_token_count += step.prefill_token_count
        for request, count in zip(step.requests, step.counts, strict=True):
            clock = request.clock
            clock.step_count += 1
            if request.output_count and request.pending_count == 1:
                clock.stalled_ns += step_ns * step.prefill_token_count // step.plan.token_count
            else:
                clock.prefill_chunk_count += 1
            before = request.computed_count
            request.computed_count += count
            self._cache.register(request, before)
        for request, result in zip(step.sampled, sampled, strict=True):
            if result.error is not None:
                request.error = result.error
                self._end(request, FinishReason.ERROR, now)
            else:
                self._append(request, result.token_id, now)

    def take_ended(self) -> list[Request]:
        """Requests that ended since the last call, each exactly once."""
        ended, self._ended = self._ended, []
        return ended

    def release(self, request: Request) -> None:
        """Give the request's blocks back, tails first, so that heads of chains stay cached longest."""
        self._pool.release(reversed(request.block_table.view.tolist()))
        request.block_table.clear()

    # --- facts ----------------------------------------------------------------------------------------

    @property
    def running_count(self) -> int:
        """Requests that hold blocks and may be scheduled."""
        return len(self._running) - sum(r.paused for r in self._running.values())

    @property
    def waiting_count(self) -> int:
        """Requests in line, with credits."""
        return len(self._waiting) - sum(r.paused for r in self._waiting)

    @property
    def paused_count(self) -> int:
        """Requests without credits, in whatever state."""
        return sum(r.paused for r in self._requests.values())

    @property
    def has_requests(self) -> bool:
        """True while any request has not ended, or an ending is not published."""
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
        for request in self._waiting:
            if len(request.block_table) or request.computed_count:
                raise AssertionError(f"waiting request {request.request_id} holds blocks")

    # --- shares ---------------------------------------------------------------------------------------

    def _share_with_running(self, shares: _Shares, now: int) -> bool:
        """Give running requests their tokens, decodes first; True when one had to be preempted."""
        before = self.counters.preemption_count
        runnable = sorted((r for r in self._running.values() if not r.paused), key=_rank)
        runnable.sort(key=lambda r: r.pending_count > 1)
        for request in runnable:
            if shares.budget == 0 or len(shares.counts) >= self.config.max_num_seqs:
                break
            if request.status is RequestStatus.RUNNING:  # not preempted by one before it
                count = min(request.pending_count, shares.budget, self.config.max_chunk_tokens)
                if self._make_room(request, request.computed_count + count, shares, now):
                    shares.give(request, count)
        return self.counters.preemption_count > before

    def _make_room(self, request: Request, token_count: int, shares: _Shares, now: int) -> bool:
        """Extend the block table to hold ``token_count`` tokens; False when the request itself had to yield."""
        missing = -(-token_count // self.config.block_size) - len(request.block_table)
        if missing <= 0:
            return True
        while self._pool.reusable_count < missing:
            victim = max(self._running.values(), key=_yields)
            shares.take_back(victim)
            self._preempt(victim, now)
            if victim is request:
                return False
        for block in self._pool.allocate(missing):
            request.block_table.append(block)
        return True

    def _admit(self, shares: _Shares, now: int) -> None:
        """Start waiting requests while slots, blocks and budget last."""
        blocked = QueueReason.NONE
        if len(self._waiting):
            active = self.running_count
            for request in self._waiting.in_order(now):
                if max(active, len(shares.counts)) >= self.config.max_num_seqs:
                    blocked = QueueReason.SLOTS
                elif shares.budget == 0:
                    blocked = QueueReason.BUDGET
                elif not self._start(request, now, alone=active == 0):
                    blocked = QueueReason.KV
                if blocked is not QueueReason.NONE:
                    break
                active += 1
                count = min(request.pending_count, shares.budget, self.config.max_chunk_tokens)
                shares.give(request, count)
        if blocked is not QueueReason.NONE:
            for request in self._waiting:
                request.clock.queue_reason = QueueReason.CREDITS if request.paused else blocked

    def _start(self, request: Request, now: int, *, alone: bool) -> bool:
        """Give a waiting request blocks for all its known tokens; False when they are not to be had now."""
        hits = self._cache.find(request)
        fresh = -(-request.token_count // self.config.block_size) - len(hits)
        revived = sum(self._pool.is_reusable(block) for block in hits)
        used = self._pool.used_count + fresh + revived
        allowed = self._pool.block_count if alone else int(self.config.watermark * self._pool.block_count)
        if used > allowed:
            self._preempt_paused(used - allowed, now, grace_ns=0 if alone else self.config.paused_grace_ns)
            return False  # no admission in a step that preempts
        for block in hits:
            self._pool.acquire(block)
            request.block_table.append(block)
        for block in self._pool.allocate(fresh):
            request.block_table.append(block)
        request.computed_count = len(hits) * self.config.block_size
        self._cache.count_query(request, request.computed_count)
        request.protected = (
            request.protected
            or self._waiting.overdue(request, now)
            or request.clock.preemption_count >= self.config.max_preemptions
        )
        self._waiting.remove(request)
        request.status = RequestStatus.RUNNING
        self._running[request.request_id] = request
        if request.preempted_since_ns:
            request.clock.preempted_ns += now - request.preempted_since_ns
            request.clock.recomputed_token_count += max(0, request.lost_count - request.computed_count)
            request.preempted_since_ns = 0
        else:
            request.clock.first_scheduled_ns = now
            request.clock.cached_token_count = request.computed_count
        return True

    def _write_plan(self, shares: _Shares, now: int) -> ScheduledStep:
        chosen = [self._running[request_id] for request_id in shares.counts]
        chosen.sort(key=lambda r: shares.counts[r.request_id] > 1)  # one-token sequences first
        counts = [shares.counts[r.request_id] for r in chosen]
        wants = [r.pending_count == count for r, count in zip(chosen, counts, strict=True)]
        planned = [
            PlannedSequence(
                token_ids=r.tokens.view[r.computed_count : r.computed_count + count],
                start=r.computed_count,
                block_table=r.block_table.view,
                needs_logits=want,
            )
            for r, count, want in zip(chosen, counts, wants, strict=True)
        ]
        return ScheduledStep(
            plan=build_plan(planned, self.config.block_size),
            requests=chosen,
            counts=counts,
            sampled=[r for r, want in zip(chosen, wants, strict=True) if want],
            decode_token_count=sum(1 for r in chosen if r.output_count and r.pending_count == 1),
            started_ns=now,
        )

    # --- transitions ----------------------------------------------------------------------------------

    def _append(self, request: Request, token_id: int, now: int) -> None:
        request.tokens.append(token_id)
        clock = request.clock
        if clock.first_token_ns == 0:
            clock.first_token_ns = now
        else:
            clock.gaps_ns.append(now - clock.last_token_ns)
        clock.last_token_ns = now
        ends = token_id in request.stop_token_ids or (not request.ignore_eos and token_id in self._eos)
        if ends and request.output_count > request.sampling.min_tokens:
            request.matched_stop_id = token_id
            self._end(request, FinishReason.STOP, now)
        elif request.max_tokens is not None and request.output_count >= request.max_tokens:
            self._end(request, FinishReason.LENGTH, now)
        elif request.paused:
            request.paused_since_ns = now

    def _preempt_paused(self, block_count: int, now: int, *, grace_ns: int) -> None:
        """Take blocks from requests that their readers hold up, until ``block_count`` are regained."""
        before = self._pool.used_count
        for request in sorted(self._running.values(), key=_yields, reverse=True):
            if before - self._pool.used_count >= block_count:
                break
            if request.paused and now - request.paused_since_ns >= grace_ns:
                self._preempt(request, now)

    def _preempt(self, request: Request, now: int) -> None:
        """Back to the line: blocks go (and stay cached while they can), tokens stay."""
        self.release(request)
        request.lost_count = request.computed_count
        request.computed_count = 0
        request.status = RequestStatus.WAITING
        request.preempted_since_ns = now
        request.clock.preemption_count += 1
        self.counters.preemption_count += 1
        del self._running[request.request_id]
        self._waiting.put(request)

    def _end_pause(self, request: Request, now: int) -> None:
        if request.paused_since_ns:
            request.clock.paused_ns += now - request.paused_since_ns
            request.paused_since_ns = 0
            if request.preempted_since_ns:
                request.preempted_since_ns = now

    def _expire(self, now: int) -> None:
        """End requests whose deadline has passed, waiting ones before they cost anything."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline_ns, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.deadline_ns == deadline_ns:
                self.abort(request_id, FinishReason.DEADLINE_EXCEEDED)

    def _end(self, request: Request, reason: FinishReason, now: int) -> None:
        self._end_pause(request, now)
        if request.preempted_since_ns:
            request.clock.preempted_ns += now - request.preempted_since_ns
            request.preempted_since_ns = 0
        if request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        else:
            del self._running[request.request_id]
        del self._requests[request.request_id]
        request.status = RequestStatus.FINISHED
        request.finish = reason
        request.clock.finished_ns = now
        self._ended.append(request)


def _rank(request: Request) -> tuple[bool, int, int, int]:
    """Sorts running requests; the first never yields to another."""
    return (not request.protected, request.priority, request.clock.arrival_ns, request.request_id)


def _yields(request: Request) -> tuple[bool, bool, int, int, int]:
    """The largest is preempted first: held up by its reader, unprotected, low class, young."""
    return (request.paused, *_rank(request))
