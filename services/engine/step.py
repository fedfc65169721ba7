"""A decided step and what came of it: whose rows a plan holds. Knows requests and plans; no policy, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.engine.plan import PlannedSequence, Sampled, StepPlan, TokenLogprobs, build_plan
from services.engine.request import Request
from services.engine.speculation import NO_DRAFT

_NOT_KNOWN: NDArray[np.int32] = np.zeros(1, dtype=np.int32)
_NO_ROWS = range(0)


@dataclass(frozen=True, slots=True)
class LogitRow:
    """A row of logits: whose, and after which tokens one is to be chosen."""

    request: Request
    token_count: int
    """Tokens before the one to be chosen; so its position."""
    guesses: NDArray[np.int32] = field(default_factory=lambda: NO_DRAFT)
    """The last of them, where they are guesses."""

    @property
    def tokens(self) -> NDArray[np.int32]:
        """These tokens: what the request knows, and guesses after it; one fewer where one is not known yet."""
        known = self.request.tokens.view[: self.token_count - self.guesses.size]
        return np.concatenate([known, self.guesses]) if self.guesses.size else known

    @property
    def output(self) -> NDArray[np.int32]:
        """Of these, the output."""
        return self.tokens[self.request.prompt_count :]

    @property
    def valid(self) -> bool:
        """True when the request knows exactly these tokens by now: every guess among them was right."""
        known = self.request.tokens
        return known.size == self.token_count and (not self.guesses.size or known[-1] == self.guesses[-1])

    @property
    def shaped(self) -> bool:
        """True when bias, bans or penalties change the logits; which of them may depend on the tokens before."""
        s = self.request.sampling
        return (
            bool(s.logit_bias)
            or s.allowed_token_ids is not None
            or bool(s.bad_sequences)
            or self.token_count - self.request.prompt_count < s.min_tokens
            or s.penalised
        )

    @property
    def untouched(self) -> bool:
        """Nothing changes or explains the logits, whatever is then chosen by them."""
        return self.request.sampling.logprobs is None and not self.shaped


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
    decode_token_count: int
    """Tokens of such requests."""
    draft_token_count: int
    """Guessed tokens."""
    prefill_token_count: int
    """Tokens of prompts and recomputation."""
    started_ns: int

    @property
    def foreseeable(self) -> bool:
        """True when all that comes of it is known before, but for the ids, and no choice asks which these were.

        The next step can then be planned while this one is computed.
        """
        return not self.explained and not self.draft_token_count and all(row.untouched for row in self.sampled)


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
    after: ScheduledStep | None = None,
) -> ScheduledStep:
    """Write down a step over the next ``counts[s]`` tokens of ``requests[s]`` and its guesses, one-token ones first.

    Only a request that catches up may have guesses. A token that the step ``after`` which this one is planned has yet
    to choose is fed: the plan says which of that step's rows has it.
    """
    if drafts is None:
        drafts = [NO_DRAFT] * len(requests)
    places = {} if after is None else {row.request: place for place, row in enumerate(after.sampled)}
    parts = []
    for request, count, draft in zip(requests, counts, drafts, strict=True):
        start, expected = request.planned_count, request.token_count + request.promised_count
        catches_up, decoding = start + count == expected, start + 1 == expected > request.prompt_count
        fed_from = places[request] if start == request.token_count else None
        parts.append(_Part(request, start, count, draft, catches_up, decoding, fed_from))
    return _written(parts, block_size, now)


def single_step(step: ScheduledStep, place: int, block_size: int) -> ScheduledStep:
    """The work of one sequence of a step alone, without guesses, when every token before it is known."""
    request, start = step.requests[place], int(step.plan.positions[step.plan.query_starts[place]])
    catches_up = any(row.request is request for row in step.sampled)
    part = _Part(request, start, step.counts[place], NO_DRAFT, catches_up, step.decoding[place], None)
    return _written([part], block_size, step.started_ns)


class _Part(NamedTuple):
    """One sequence of a step."""

    request: Request
    start: int
    length: int
    draft: NDArray[np.int32]
    catches_up: bool
    decoding: bool
    fed_from: int | None


def _written(parts: list[_Part], block_size: int, now: int) -> ScheduledStep:
    planned: list[PlannedSequence] = []
    sampled: list[LogitRow] = []
    explained: list[tuple[Request, int]] = []
    for request, start, length, draft, catches_up, _, fed_from in parts:
        end, drafted = start + length, draft.size
        tokens = request.tokens.view[start:end] if fed_from is None else _NOT_KNOWN
        if catches_up:
            sampled.append(LogitRow(request, end, NO_DRAFT))
        if drafted:
            tokens = np.concatenate([tokens, draft])
            sampled += [LogitRow(request, end + size, draft[:size]) for size in range(1, drafted + 1)]
        told = _prompt_rows(request, start, length)
        if told:
            explained.append((request, len(told)))
        rows = drafted + catches_up
        planned.append(PlannedSequence(tokens, start, request.block_table.view, rows, told, fed_from))
    plan = build_plan(planned, block_size)
    decode_count, draft_count = sum(part.decoding for part in parts), sum(part.draft.size for part in parts)
    return ScheduledStep(
        plan=plan,
        requests=[part.request for part in parts],
        counts=[part.length for part in parts],
        drafts=[part.draft for part in parts],
        sampled=sampled,
        explained=explained,
        decoding=[part.decoding for part in parts],
        decode_token_count=decode_count,
        draft_token_count=draft_count,
        prefill_token_count=plan.token_count - decode_count - draft_count,
        started_ns=now,
    )


def _prompt_rows(request: Request, start: int, count: int) -> range:
    """Rows of ``count`` tokens from ``start`` after which a prompt token stands that is not explained yet."""
    if request.sampling.prompt_logprobs is None:
        return _NO_ROWS
    first = max(start, len(request.prompt_logprobs))  # entry i explains token i + 1, which follows row i
    return range(first - start, min(start + count, request.prompt_count - 1) - start)
