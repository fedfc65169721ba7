"""One request as the engine sees it: token ids, progress, credits and the clock's readings.

Knows nothing of text, tenants, tensors or the wire. Errors drawn as a tree:

    ValueError
    └── RequestRefused      the request can never run here; raised when it is added, never later
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

import numpy as np

from services.engine.int_buffer import IntBuffer
from services.engine.plan import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from services.engine.speculation import Lookup

UNLIMITED_CREDITS = 1 << 62
"""A credit limit that no request reaches."""

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this mean greedy decoding."""


class Priority(IntEnum):
    """Scheduling class; a lower value goes first."""

    INTERACTIVE = 0
    STANDARD = 1
    BATCH = 2


class RequestStatus(Enum):
    """Where a request is. A preempted request is WAITING again; a paused one keeps its status."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    ERROR = "error"


class QueueReason(Enum):
    """What a waiting request lacked when it was last passed over; NONE: it only waited for a step to end."""

    NONE = "none"
    SLOTS = "slots"
    KV = "kv"
    BUDGET = "budget"
    CREDITS = "credits"


class RequestRefused(ValueError):
    """The request can never run on this engine.

    Attributes:
        field: the request field at fault.
        reason: a machine word: EMPTY_PROMPT, OUT_OF_VOCABULARY, CONTEXT_LENGTH, KV_CAPACITY,
            INVALID_VALUE, DUPLICATE_ID.
    """

    def __init__(self, field: str, reason: str, message: str) -> None:
        super().__init__(message)
        self.field = field
        self.reason = reason


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Values are resolved: nothing here means "the model's default".

    Order of application: raw logprobs → bias, allowed, bad sequences, min_tokens → penalties →
    temperature → min_p → top_k → top_p → draw.
    """

    temperature: float = 1.0
    """Below 1e-5 is greedy."""
    top_k: int = 0
    """Candidates kept; 0 and -1 are off."""
    top_p: float = 1.0
    """Smallest set of candidates with at least this mass; 1 is off."""
    min_p: float = 0.0
    """Candidates below min_p times the most likely one's probability are dropped; 0 is off."""
    seed: int | None = None
    """int64; None: the engine draws one when the request is made."""
    repetition_penalty: float = 1.0
    """Over prompt and output; 1 is off."""
    presence_penalty: float = 0.0
    """Over the output; 0 is off."""
    frequency_penalty: float = 0.0
    """Over the output, per occurrence; 0 is off."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logit of each token id."""
    allowed_token_ids: tuple[int, ...] | None = None
    """When given, no other token can be chosen."""
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear in the output."""
    min_tokens: int = 0
    """End-of-sequence and stop token ids are impossible before this many output tokens."""
    logprobs: int | None = None
    """None: no logprobs; k ≥ 0: the chosen token's and those of the k most likely tokens."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt after the first. Such a request computes its whole prompt itself."""

    @property
    def greedy(self) -> bool:
        """True when the most likely token is taken without a draw."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def penalised(self) -> bool:
        """True when tokens that are known already become more or less likely."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def answer_seed(seed: int, index: int) -> int:
    """Seed of answer ``index`` of n: answer 0 has the request's own seed, others differ reproducibly."""
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    return mixed - (1 << 64) if mixed >= 1 << 63 else mixed


class Away(Enum):
    """Why a request that had begun could not advance."""

    PREEMPTED = "preempted"
    PAUSED = "paused"


class PreemptReason(Enum):
    """Why a request lost its blocks."""

    KV = "kv"
    """Another needed them, and went before it."""
    PAUSED = "paused"
    """Its reader held it up, and others waited for room."""
    SHARE = "share"
    """Paused requests under its salt held more than their share of the pool."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A time in which a request that had begun could not advance, on ``time.monotonic_ns``."""

    why: Away
    start_ns: int
    end_ns: int
    reason: PreemptReason | None = None
    """Of a preemption."""
    recomputed_token_count: int = 0
    """After a preemption; 0 where it ended before."""


MAX_INTERVALS = 32
"""Intervals that a request remembers; later ones are in the sums alone."""


@dataclass(slots=True)
class RequestClock:
    """What a request's receipt is made of. Moments are ``time.monotonic_ns``; 0 means "not yet"."""

    arrival_ns: int = 0
    first_scheduled_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    finished_ns: int = 0
    queue_reason: QueueReason = QueueReason.NONE
    cached_token_count: int = 0
    """Prompt tokens found in the prefix cache when first admitted."""
    prefill_chunk_count: int = 0
    """Steps that computed more of the prompt, or recomputed after a preemption."""
    step_count: int = 0
    """Steps that carried this request."""
    preemption_count: int = 0
    preempted_ns: int = 0
    """Time between preemptions and being scheduled again, without time paused by the reader."""
    recomputed_token_count: int = 0
    """Tokens computed again because of preemptions (those found in the cache are not counted)."""
    paused_ns: int = 0
    """Time after the first token in which the reader had granted no credits."""
    decode_step_count: int = 0
    """Steps that gave this request a token, or several."""
    drafted_token_count: int = 0
    """Guessed tokens that were computed."""
    accepted_token_count: int = 0
    """Of those, the ones that became output."""
    stalled_ns: int = 0
    """Decode time owed to other requests' prefill: each shared step's time times the share of its tokens
    that were others' prefill."""
    gaps_ns: list[int] = field(default_factory=list)
    """Time between one output token and the next."""
    intervals: list[Interval] = field(default_factory=list)
    """The first times of being preempted or paused, in order of their ends."""

    def was_away(self, interval: Interval) -> None:
        """Account for a time in which the request could not advance."""
        duration_ns = interval.end_ns - interval.start_ns
        if interval.why is Away.PREEMPTED:
            self.preempted_ns += duration_ns
            self.recomputed_token_count += interval.recomputed_token_count
        else:
            self.paused_ns += duration_ns
        if len(self.intervals) < MAX_INTERVALS:
            self.intervals.append(interval)

    def gap_ns(self, quantile: float) -> int:
        """The inter-token gap at a quantile (nearest rank); 0 with fewer than two tokens."""
        if not self.gaps_ns:
            return 0
        ordered = sorted(self.gaps_ns)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


class Request:
    """A prompt on its way to an answer.

    The one idea: ``computed_count`` catches up with ``token_count``; when they meet, one more token is
    sampled. Only the scheduler's ``commit`` advances either. While a step is computed, what it carries of the request
    is in flight, and the token that it will choose is promised: what comes next is planned from there.
    """

    __slots__ = (
        "block_hashes",
        "block_table",
        "cache_salt",
        "clock",
        "computed_count",
        "credit_limit",
        "deadline_ns",
        "error",
        "fair_key",
        "fair_weight",
        "finish",
        "ignore_eos",
        "in_flight_count",
        "lookup",
        "lost_count",
        "matched_stop_id",
        "max_tokens",
        "paused_since_ns",
        "predicted_cached_count",
        "preempt_reason",
        "preempted_since_ns",
        "priority",
        "promised_count",
        "prompt_count",
        "prompt_logprobs",
        "protected",
        "request_id",
        "resumed_count",
        "sampling",
        "seed",
        "status",
        "stop_token_ids",
        "tokens",
    )

    def __init__(
        self,
        request_id: int,
        prompt_ids: Iterable[int] | NDArray[np.int32],
        *,
        max_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        stop_token_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        priority: Priority = Priority.STANDARD,
        cache_salt: bytes = b"",
        fair_key: bytes = b"",
        fair_weight: float = 1.0,
        deadline_ns: int | None = None,
        credit_limit: int = UNLIMITED_CREDITS,
        arrival_ns: int = 0,
        generated_ids: Iterable[int] | NDArray[np.int32] = (),
    ) -> None:
        """Make a waiting request.

        Args:
            request_id: unique in the engine.
            prompt_ids: token ids; values are checked when the request is added.
            max_tokens: most output tokens; None: the rest of the context.
            sampling: resolved parameters; None: the defaults of SamplingParams.
            stop_token_ids: ids that end the answer (and are part of it), beside the model's own.
            ignore_eos: the model's end-of-sequence ids do not end the answer.
            priority: scheduling class.
            cache_salt: only requests with the same salt share cached blocks.
            fair_key: requests with the same key share one place in line.
            fair_weight: what that key may have beside others; above 0.
            deadline_ns: on ``time.monotonic_ns``; None: no deadline.
            credit_limit: output tokens that the reader has allowed so far.
            arrival_ns: when it reached the engine; 0: when it is added.
            generated_ids: output of an earlier run, which this one goes on after: it counts as output, and is
                allowed beyond ``credit_limit``.
        """
        self.request_id = request_id
        self.tokens = IntBuffer(prompt_ids)
        self.prompt_count = self.tokens.size
        self.tokens.extend(np.asarray(generated_ids, dtype=np.int32))
        self.resumed_count = self.tokens.size - self.prompt_count
        self.max_tokens = max_tokens
        self.sampling = sampling if sampling is not None else SamplingParams()
        self.seed = self.sampling.seed if self.sampling.seed is not None else secrets.randbits(63)
        self.stop_token_ids = frozenset(stop_token_ids)
        self.ignore_eos = ignore_eos
        self.priority = priority
        self.cache_salt = cache_salt
        self.fair_key = fair_key
        self.fair_weight = fair_weight
        self.deadline_ns = deadline_ns
        self.credit_limit = credit_limit + self.resumed_count
        self.status = RequestStatus.WAITING
        self.finish: FinishReason | None = None
        self.matched_stop_id: int | None = None
        self.error: str | None = None
        self.computed_count = 0  # leading tokens whose keys and values are in the block table
        self.in_flight_count = 0  # tokens that scheduled steps compute and that are not committed
        self.promised_count = 0  # tokens that these steps will choose
        self.prompt_logprobs: list[TokenLogprobs] = []  # where asked for: of tokens 1, 2, ..., as they are computed
        self.block_table = IntBuffer()
        self.block_hashes: list[bytes] = []  # chained, one a full block
        self.lookup: Lookup | None = None  # where its tokens are guessed from; made when first needed
        self.predicted_cached_count = 0  # found in the cache on arrival; orders the queue
        self.protected = False  # waited, or was preempted, too long: others are preempted first
        self.lost_count = 0  # tokens that were computed before the last preemption
        self.preempted_since_ns = 0
        self.preempt_reason: PreemptReason | None = None  # of the last preemption
        self.paused_since_ns = 0
        self.clock = RequestClock(arrival_ns=arrival_ns)

    @property
    def token_count(self) -> int:
        """Known tokens: prompt and output."""
        return self.tokens.size

    @property
    def output_count(self) -> int:
        """Tokens generated so far."""
        return self.tokens.size - self.prompt_count

    @property
    def planned_count(self) -> int:
        """Leading tokens that are computed or in flight."""
        return self.computed_count + self.in_flight_count

    @property
    def pending_count(self) -> int:
        """Known and promised tokens that are neither computed nor in flight."""
        return self.tokens.size + self.promised_count - self.computed_count - self.in_flight_count

    @property
    def uncached_count(self) -> int:
        """Known tokens that are expected to be computed when it starts."""
        return max(1, self.token_count - self.predicted_cached_count)

    @property
    def most_new_tokens(self) -> int:
        """Tokens that it may still be given beside those promised, by its length and by its reader."""
        allowed = self.credit_limit if self.max_tokens is None else min(self.max_tokens, self.credit_limit)
        return allowed + self.prompt_count - self.tokens.size - self.promised_count

    @property
    def reusable_count(self) -> int:
        """Leading tokens that a cached block may stand for: not those whose logits are still wanted, nor the last."""
        most = self.token_count - 1
        if self.sampling.prompt_logprobs is None or len(self.prompt_logprobs) >= self.prompt_count - 1:
            return most
        return min(most, len(self.prompt_logprobs))

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        """The prompt, [prompt_count] int32, without a copy."""
        return self.tokens.view[: self.prompt_count]

    @property
    def output_ids(self) -> NDArray[np.int32]:
        """The tokens generated so far, [output_count] int32, without a copy."""
        return self.tokens.view[self.prompt_count :]

    @property
    def paused(self) -> bool:
        """True while the reader allows no further token."""
        return self.tokens.size - self.prompt_count >= self.credit_limit
