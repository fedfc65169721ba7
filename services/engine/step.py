"""A decided step and what came of it: whose rows a plan holds. Knows requests and plans; no policy, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.engine.plan import PlannedSequence, Sampled, StepPlan, TokenLogprobs, build_plan
from services.engine.request import Request
from services.engine.speculation import NO_DRAFT


@dataclass(frozen=True, slots=True)
class LogitRow:
    """A row of logits: whose, and after which tokens one is to be chosen."""

    request: Request
    tokens: NDArray[np.int32]
    """Every token before the one to be chosen: what the request knows, and guesses after it."""

    @property
    def output(self) -> NDArray[np.int32]:
        """Of these, the output."""
        return self.tokens[self.request.prompt_count :]

    @property
    def valid(self) -> bool:
        """True when the request knows exactly these tokens by now: every guess among them was right."""
        known = self.request.tokens
        return len(known) == self.tokens.size and known[-1] == self.tokens[-1]


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan and whose it is."""

    plan: StepPlan
    requests: list[Request]
    """[S] the plan's sequences."""
    counts: list[int]
    """[S] known tokens of each."""
    drafts: list[NDArray[np.int32]]
    """[S] guessed tokens of each, computed after the known ones."""
    sampled: list[LogitRow]
    """[L] the plan's logit rows, in order: of a request that catches up, one, and one after each guess."""
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
    def draft_token_count(self) -> int:
        """Guessed tokens."""
        return sum(draft.size for draft in self.drafts)

    @property
    def prefill_token_count(self) -> int:
        """Tokens of prompts and recomputation."""
        return self.plan.token_count - self.decode_token_count - self.draft_token_count


@dataclass(frozen=True, slots=True)
class StepResult:
    """What computing a step gave."""

    sampled: list[Sampled | None]
    """Answers the step's ``sampled``; None: its guess was not computed after all."""
    explained: list[list[TokenLogprobs]] = field(default_factory=list)
    """Answers the step's ``explained``: one entry a row."""
    failed: dict[int, str] = field(default_factory=dict)
    """Requests, by id, whose sequence could not be computed, and why; they end alone."""


def write_step(
    requests: list[Request],
    counts: list[int],
    block_size: int,
    now: int,
    drafts: list[NDArray[np.int32]] | None = None,
) -> ScheduledStep:
    """Write down a step over ``counts[s]`` tokens of ``requests[s]`` and its guesses, ordered (one-token ones first).

    Only a request that catches up may have guesses.
    """
    if drafts is None:
        drafts = [NO_DRAFT] * len(requests)
    planned: list[PlannedSequence] = []
    sampled: list[LogitRow] = []
    explained: list[tuple[Request, int]] = []
    for request, count, draft in zip(requests, counts, drafts, strict=True):
        start = request.computed_count
        tokens = request.tokens.view
        rows: Sequence[LogitRow] = ()
        if start + count == tokens.size:
            if draft.size:
                tokens = np.concatenate([tokens, draft])
            rows = [LogitRow(request, tokens[:end]) for end in range(start + count, tokens.size + 1)]
        told = _prompt_rows(request, count)
        if told:
            explained.append((request, len(told)))
        sampled += rows
        planned.append(
            PlannedSequence(
                token_ids=tokens[start : start + count + draft.size],
                start=start,
                block_table=request.block_table.view,
                logit_count=len(rows),
                prompt_rows=told,
            )
        )
    return ScheduledStep(
        plan=build_plan(planned, block_size),
        requests=requests,
        counts=counts,
        drafts=drafts,
        sampled=sampled,
        explained=explained,
        decoding=[bool(r.output_count) and r.pending_count == 1 for r in requests],
        started_ns=now,
    )


def single_steps(step: ScheduledStep, block_size: int) -> list[ScheduledStep]:
    """The same work, one sequence a step, without guesses."""
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
