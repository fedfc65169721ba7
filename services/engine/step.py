"""A decided step and what came of it: whose rows a plan holds. Knows requests and plans; no policy, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.engine.plan import PlannedSequence, Sampled, StepPlan, TokenLogprobs, build_plan
from services.engine.request import Request


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
    explained: list[tuple[Request, int]]
    """Requests that asked for their prompt's log probabilities, and how many of the plan's prompt rows are theirs;
    in the order of those rows."""
    decoding: list[bool]
    """[S] whether the request had caught up but for its last token."""
    started_ns: int

    @property
    def decode_token_count(self) -> int:
        """Tokens of requests that had caught up but for their last token."""
        return sum(self.decoding)

    @property
    def prefill_token_count(self) -> int:
        """Tokens of prompts and recomputation."""
        return self.plan.token_count - self.decode_token_count


@dataclass(frozen=True, slots=True)
class StepResult:
    """What computing a step gave."""

    sampled: list[Sampled]
    """Answers the step's ``sampled``."""
    explained: list[list[TokenLogprobs]] = field(default_factory=list)
    """Answers the step's ``explained``: one entry a row."""
    failed: dict[int, str] = field(default_factory=dict)
    """Requests, by id, whose sequence could not be computed, and why; they end alone."""


def write_step(requests: list[Request], counts: list[int], block_size: int, now: int) -> ScheduledStep:
    """Write down a step over ``counts[s]`` tokens of ``requests[s]``, already ordered (one-token ones first)."""
    wants = [r.pending_count == count for r, count in zip(requests, counts, strict=True)]
    told = [_prompt_rows(r, count) for r, count in zip(requests, counts, strict=True)]
    planned = [
        PlannedSequence(
            token_ids=r.tokens.view[r.computed_count : r.computed_count + count],
            start=r.computed_count,
            block_table=r.block_table.view,
            needs_logits=want,
            prompt_rows=rows,
        )
        for r, count, want, rows in zip(requests, counts, wants, told, strict=True)
    ]
    return ScheduledStep(
        plan=build_plan(planned, block_size),
        requests=requests,
        counts=counts,
        sampled=[r for r, want in zip(requests, wants, strict=True) if want],
        explained=[(r, len(rows)) for r, rows in zip(requests, told, strict=True) if rows],
        decoding=[bool(r.output_count) and r.pending_count == 1 for r in requests],
        started_ns=now,
    )


def single_steps(step: ScheduledStep, block_size: int) -> list[ScheduledStep]:
    """The same work, one sequence a step."""
    return [
        write_step([request], [count], block_size, step.started_ns)
        for request, count in zip(step.requests, step.counts, strict=True)
    ]


def _prompt_rows(request: Request, count: int) -> range:
    """Rows of the request's next ``count`` tokens after which a prompt token stands that is not explained yet."""
    if request.sampling.prompt_logprobs is None:
        return range(0)
    start = request.computed_count
    first = max(start, len(request.prompt_logprobs))  # entry i explains token i + 1, which follows row i
    return range(first - start, min(start + count, request.prompt_count - 1) - start)
