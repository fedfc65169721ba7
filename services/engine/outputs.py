"""What comes out of a step: tokens, endings, usage and counts. Knows no tensors and no wire."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from services.engine.plan import TokenLogprobs
from services.engine.request import FinishReason, Request, RequestClock


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """A request's counts and times, not shared with the engine."""

    prompt_token_count: int
    cached_token_count: int
    output_token_count: int
    clock: RequestClock

    @classmethod
    def of(cls, request: Request) -> RequestUsage:
        """Copy from a request as it is now."""
        return cls(
            prompt_token_count=request.prompt_count,
            cached_token_count=request.clock.cached_token_count,
            output_token_count=request.output_count,
            clock=replace(request.clock, gaps_ns=list(request.clock.gaps_ns), intervals=list(request.clock.intervals)),
        )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request's news of one step: new tokens, an ending, or both. Exactly one a request has ``finish``."""

    request_id: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each token, when asked for."""
    prompt_ids: tuple[int, ...] | None = None
    """With the first token, when asked for: the prompt's tokens after the first."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of ``prompt_ids``."""
    finish: FinishReason | None = None
    matched_stop_id: int | None = None
    """The end-of-sequence or stop token that ended it; it is the last of the tokens."""
    error: str | None = None
    usage: RequestUsage | None = None
    """With the first token and with the ending."""


@dataclass(frozen=True, slots=True)
class StepMember:
    """One request's part in a step."""

    request_id: int
    token_count: int
    """Guesses too."""
    decoding: bool
    """It had caught up but for its last token; else the tokens are of its prompt, or recomputed."""


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What a step carried."""

    started_ns: int
    step_ns: int
    prefill_token_count: int
    decode_token_count: int
    sequence_count: int
    members: tuple[StepMember, ...] = ()
    host_gap_ns: int | None = None
    """From the end of the last step's computing to the beginning of this one's: scheduling, publishing, commands.
    0: it was launched before the last one was waited for. None: there was nothing to compute between them."""
    draft_token_count: int = 0
    """Guessed tokens, beside those of decode."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Everything to tell after a step."""

    outputs: list[RequestOutput] = field(default_factory=list)
    facts: StepFacts | None = None
    """None when nothing was computed."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and totals."""

    running_count: int
    waiting_count: int
    paused_count: int
    kv_block_total: int
    kv_block_free: int
    """Unreferenced and empty; free + cached + used = total."""
    kv_block_cached: int
    """Unreferenced, but good for a prefix hit."""
    preemption_count: int
    prefilled_token_count: int
    decoded_token_count: int
    drafted_token_count: int
    """Guessed tokens that were computed."""
    accepted_token_count: int
    """Of those, the ones that became output."""
    step_count: int
    prefix_queried_token_count: int
    prefix_hit_token_count: int
    kv_wasted_token_count: int
    """Places for tokens in the blocks of running requests that no known token needs yet."""
    backlog_token_count: int
    """Known tokens of waiting requests that are not computed."""
