"""Decides what each step computes.

Knows requests, blocks and the clock; nothing of tensors, text or the wire.

The one idea: there is no prefill phase and no decode phase, only computed tokens catching up with known
tokens under a token budget a step. A chunk of a prompt, one decoded token, a prefix hit and the recomputation
after a preemption are the same thing with different counts. A request without credits is not scheduled. A guess
(``speculation``) is a token that may become known: it takes what the step has left, and is computed ahead.

Invariants: only ``commit`` advances a request (admission starts it at what the cache holds); the first request
in rank order is never preempted, so at least one always advances.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.engine.block_pool import BlockPool
from services.engine.budget import BudgetPolicy, StepBudget
from services.engine.paused import preempt_paused, preempt_paused_over
from services.engine.plan import Sampled
from services.engine.prefix_cache import PrefixCache
from services.engine.request import FinishReason, PreemptReason, QueueReason, Request, RequestStatus
from services.engine.roster import Roster
from services.engine.speculation import Speculation
from services.engine.step import ScheduledStep, StepResult, write_step
from services.engine.waiting import WaitingPolicy

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Bounds of a step and of admission."""

    block_size: int = 16
    budget: BudgetPolicy = field(default_factory=BudgetPolicy)
    watermark: float = 0.85
    """Share of the pool that may be referenced after an admission."""
    max_preemptions: int = 3
    """After this many a request starts again only when nobody who runs could preempt it once more."""
    paused_grace_ns: int = 1_000_000_000
    """A paused request keeps its blocks this long when others wait for room."""
    paused_kv_share: float = 0.5
    """Share of the pool that paused requests under one salt (a tenant's) may keep."""
    num_speculative_tokens: int = 0
    """Guesses computed of one request a step, at most; 0: none."""
    waiting: WaitingPolicy = field(default_factory=WaitingPolicy)


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    prefilled_token_count: int = 0
    decoded_token_count: int = 0
    drafted_token_count: int = 0
    accepted_token_count: int = 0
    step_count: int = 0


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
        self._speculation = Speculation(config.num_speculative_tokens)
        self._committed_ns = 0  # when the last step was
        self.roster = Roster(pool, config.waiting)

    def add(self, request: Request) -> None:
        """Let a checked request wait. Raises KeyError when its id is in use."""
        request.predicted_cached_count = len(self._cache.find(request)) * self.config.block_size
        self.roster.add(request, self._clock())

    # --- one step -------------------------------------------------------------------------------------

    def schedule(self, after: ScheduledStep | None = None) -> ScheduledStep | None:
        """Choose the next step's tokens; None when nothing can be computed now.

        It may come ``after`` one that is not committed yet: what that one chooses is taken as known, but for the id.
        """
        now = self._clock()
        self.roster.expire(now)
        before = self.roster.preemption_count
        preempt_paused_over(self.roster, int(self.config.paused_kv_share * self._pool.block_count), now)
        runnable = [r for r in self.roster.running if r.most_new_tokens > 0]
        line = self.roster.waiting.in_order(now)
        guest = self._guest(line)
        shares = StepBudget(self.config.budget, sum(r.pending_count == 1 for r in runnable), int(guest is not None))
        later = self._share_with_running(runnable, line, shares, now)
        shares.kept_places = 0
        if self.roster.preemption_count == before:  # no admission in a step that preempts
            self._admit(line, guest, shares, now)
        self._share(later, shares, now)
        if not shares.counts:
            return None
        step = self._write(shares, now, after)
        for request, count in zip(step.requests, step.counts, strict=True):
            request.in_flight_count += count
        for row in step.sampled:
            row.request.promised_count += not row.guesses.size
        return step

    def commit(self, step: ScheduledStep, result: StepResult) -> list[tuple[Request, Sampled]]:
        """Advance every request of a step that was computed; those that failed end.

        What became of a request since the step was scheduled stays: one that has ended is given nothing, and one that
        was preempted keeps the token, but not what was computed.

        Returns:
            The tokens that became known, request by request, each request's in order.
        """
        now = self._clock()
        step_ns = now - max(step.started_ns, self._committed_ns)
        self._committed_ns = now
        self.counters.step_count += 1
        self.counters.prefilled_token_count += step.prefill_token_count
        self.counters.drafted_token_count += step.draft_token_count
        stalled_ns = step_ns * step.prefill_token_count // step.plan.token_count
        for request, count, draft, decoding in zip(step.requests, step.counts, step.drafts, step.decoding, strict=True):
            request.in_flight_count -= count
            clock = request.clock
            clock.step_count += 1
            clock.drafted_token_count += draft.size
            if decoding:
                clock.stalled_ns += stalled_ns
            else:
                clock.prefill_chunk_count += 1
            if request.request_id in result.failed and request.status is not RequestStatus.FINISHED:
                self._fail(request, result.failed[request.request_id], now)
            elif request.status is RequestStatus.RUNNING:
                self._advance(request, request.computed_count + count)
        for (request, _), entries in zip(step.explained, result.explained, strict=True):
            request.prompt_logprobs.extend(entries)
        known: list[tuple[Request, Sampled]] = []
        for row, sampled in zip(step.sampled, result.sampled, strict=True):
            request, guessed = row.request, row.guesses.size > 0
            request.promised_count -= not guessed
            if sampled is None or request.status is RequestStatus.FINISHED or not row.valid:
                continue
            if sampled.error is not None:
                self._fail(request, sampled.error, now)
                continue
            if guessed:  # its last token was a guess, and has become known
                self._advance(request, row.token_count)
                request.clock.accepted_token_count += 1
                self.counters.accepted_token_count += 1
            else:
                request.clock.decode_step_count += 1
            self._append(request, sampled.token_id, now)
            known.append((request, sampled))
        self.counters.decoded_token_count += len(known)
        return known

    # --- shares ---------------------------------------------------------------------------------------

    def _share_with_running(
        self, runnable: list[Request], line: list[Request], shares: StepBudget, now: int
    ) -> list[Request]:
        """Give running requests their tokens, in the profile's order.

        Returns:
            Prompts that get what is left when those have started that wait and have less to do.
        """
        decodes = sorted((r for r in runnable if r.pending_count == 1), key=_rank)
        prompts = sorted((r for r in runnable if r.pending_count > 1), key=_rank)
        places = self.config.budget.max_num_seqs - shares.kept_places - len(prompts)
        if len(decodes) > places:  # they take turns; those that were together in the last step do too
            turn = self.counters.step_count % len(decodes)
            decodes = decodes[turn:] + decodes[:turn]
        if self.config.budget.prompts_first or len(decodes) > places:
            decodes.sort(key=lambda r: r.clock.last_token_ns)  # also where prompts leave too few tokens for all
        if not self.config.budget.prompts_first:
            self._share(decodes[: max(1, places)] + prompts, shares, now)
            return []
        prompts[1:] = sorted(prompts[1:], key=_work_left)
        later = [prompt for prompt in prompts[1:] if line and _work_left(line[0]) < _work_left(prompt)]
        self._share(prompts[: len(prompts) - len(later)] + decodes, shares, now)
        return later

    def _share(self, requests: list[Request], shares: StepBudget, now: int) -> None:
        """Give running requests tokens while there are any."""
        for request in requests:
            if shares.spent or shares.full:
                break
            if request.status is not RequestStatus.RUNNING:  # preempted by one before it
                continue
            count = shares.offer(request)
            if count and self._make_room(request, request.planned_count + count, shares, now):
                shares.give(request, count)

    def _make_room(self, request: Request, token_count: int, shares: StepBudget, now: int) -> bool:
        """Extend the block table to hold ``token_count`` tokens; False when the request itself had to yield."""
        missing = -(-token_count // self.config.block_size) - len(request.block_table)
        if missing <= 0:
            return True
        while self._pool.reusable_count < missing:
            victim = max(self.roster.running, key=_yields)
            shares.take_back(victim)
            self.roster.preempt(victim, PreemptReason.KV, now)
            if victim is request:
                return False
        for block in self._pool.allocate(missing):
            request.block_table.append(block)
        return True

    def _guest(self, line: list[Request]) -> Request | None:
        """Who starts though all places are taken: the first of a key that has none, where another has several.

        It takes nobody's place: more run than a step computes, and they take turns. It is put first in the line.
        """
        most, running = self.config.budget.max_num_seqs, [r for r in self.roster.running if not r.paused]
        if not line or not most <= len(running) < 2 * most:
            return None
        keys, first_class = {r.fair_key for r in running}, min(r.priority for r in line)
        if len(keys) == len(running) or first_class > max(r.priority for r in running):
            return None
        guest = next((r for r in line if r.fair_key not in keys and r.priority == first_class), None)
        if guest is not None:
            line.remove(guest)
            line.insert(0, guest)
        return guest

    def _admit(self, line: list[Request], guest: Request | None, shares: StepBudget, now: int) -> None:
        """Start those of the line while slots, blocks and budget last; the guest also beyond the slots.

        A request whose next block is just being computed by another waits for it: identical prompts that
        arrive together are computed once.
        """
        if not len(self.roster.waiting):
            return
        blocked = QueueReason.NONE
        active = self.roster.running_count
        promised = {name for r in self.roster.running if _in_prompt(r) for name in self._cache.promised(r)}
        for request in line:
            if shares.full or (active >= self.config.budget.max_num_seqs and request is not guest):
                blocked = QueueReason.SLOTS
                break
            if shares.spent_on_prompts:
                blocked = QueueReason.BUDGET
                break
            if request.in_flight_count or self._would_yield_again(request):
                continue
            hits = self._cache.find(request)
            if promised and self._cache.wants(request, len(hits)) in promised:
                continue
            if not self._start(request, hits, now, alone=active == 0):
                blocked = QueueReason.KV
                break
            active += 1
            shares.give(request, shares.offer(request))
            promised.update(self._cache.promised(request))
        if blocked is not QueueReason.NONE:
            for request in self.roster.waiting:
                request.clock.queue_reason = QueueReason.CREDITS if request.paused else blocked

    def _would_yield_again(self, request: Request) -> bool:
        """True when a request that was preempted often enough could be preempted by one that runs."""
        if request.clock.preemption_count < self.config.max_preemptions:
            return False
        request.protected = True
        return any(_rank(other) < _rank(request) for other in self.roster.running)

    def _start(self, request: Request, hits: list[int], now: int, *, alone: bool) -> bool:
        """Give a waiting request blocks for all its known tokens; False when they are not to be had now."""
        fresh = -(-request.token_count // self.config.block_size) - len(hits)
        revived = sum(self._pool.is_reusable(block) for block in hits)
        used = self._pool.used_count + fresh + revived
        allowed = self._pool.block_count if alone else int(self.config.watermark * self._pool.block_count)
        if used > allowed:
            grace_ns = 0 if alone else self.config.paused_grace_ns
            preempt_paused(self.roster, self._pool, used - allowed, now - grace_ns, now)
            return False  # no admission in a step that preempts
        for block in hits:
            self._pool.acquire(block)
            request.block_table.append(block)
        for block in self._pool.allocate(fresh):
            request.block_table.append(block)
        request.computed_count = len(hits) * self.config.block_size
        self._cache.count_query(request, request.computed_count)
        request.protected = request.protected or self.roster.waiting.overdue(request, now)
        self.roster.start(request, now)
        return True

    def _write(self, shares: StepBudget, now: int, after: ScheduledStep | None) -> ScheduledStep:
        chosen = [self.roster.running_by_id(request_id) for request_id in shares.counts]
        counts = [shares.counts[r.request_id] for r in chosen]
        drafts = self._speculation.drafts(chosen, counts, shares.left)
        drafts = [draft[: self._spare_places(r, draft.size)] for r, draft in zip(chosen, drafts, strict=True)]
        lengths = [count + draft.size for count, draft in zip(counts, drafts, strict=True)]
        order = sorted(range(len(chosen)), key=lambda place: lengths[place] > 1)  # one-token sequences first
        return write_step(
            [chosen[place] for place in order],
            [counts[place] for place in order],
            self.config.block_size,
            now,
            [drafts[place] for place in order],
            after,
        )

    def _spare_places(self, request: Request, count: int) -> int:
        """Extend the block table by ``count`` places for guesses, or as many as are to be had without preempting."""
        if not count:
            return 0
        size, table = self.config.block_size, request.block_table
        missing = -(-(request.token_count + count) // size) - len(table)
        for block in self._pool.allocate(max(0, min(missing, self._pool.reusable_count))):
            table.append(block)
        return min(count, len(table) * size - request.token_count)

    # --- transitions ----------------------------------------------------------------------------------

    def _advance(self, request: Request, computed_count: int) -> None:
        """The request's first ``computed_count`` tokens are computed; full blocks of them may be shared."""
        before = request.computed_count
        request.computed_count = computed_count
        self._cache.register(request, before)

    def _fail(self, request: Request, error: str, now: int) -> None:
        request.error = error
        self.roster.end(request, FinishReason.ERROR, now)

    def _append(self, request: Request, token_id: int, now: int) -> None:
        request.tokens.append(token_id)
        self.roster.waiting.fair.give(request.fair_key, 1, request.fair_weight)
        clock = request.clock
        if clock.first_token_ns == 0:
            clock.first_token_ns = now
        else:
            clock.gaps_ns.append(now - clock.last_token_ns)
        clock.last_token_ns = now
        ends = token_id in request.stop_token_ids or (not request.ignore_eos and token_id in self._eos)
        if ends and request.output_count > request.sampling.min_tokens:
            request.matched_stop_id = token_id
            self.roster.end(request, FinishReason.STOP, now)
        elif request.max_tokens is not None and request.output_count >= request.max_tokens:
            self.roster.end(request, FinishReason.LENGTH, now)
        elif request.paused:
            request.paused_since_ns = now


def _work_left(request: Request) -> tuple[bool, int, int]:
    """Sorts prompts behind the oldest one: short work first, so that two long ones do not take all until one ends."""
    return (not request.protected, request.priority, min(request.pending_count, request.uncached_count))


def _in_prompt(request: Request) -> bool:
    """More is to be computed of it than one decoded token, in flight or not."""
    return request.token_count - request.computed_count > 1


def _rank(request: Request) -> tuple[bool, int, int, int]:
    """Sorts running requests; the first never yields to another."""
    return (not request.protected, request.priority, request.clock.arrival_ns, request.request_id)


def _yields(request: Request) -> tuple[bool, bool, int, int, int]:
    """The largest is preempted first: held up by its reader, unprotected, low class, young."""
    return (request.paused, *_rank(request))
