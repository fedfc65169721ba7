"""What one step computes, written down between deciding and doing.

Flat int32 arrays: no requests, no tensors, no policy. The scheduler makes a plan, the runner only reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step over T tokens of S sequences, L of which get a token.

    Sequences with one token (decode) come first, then the longer ones (prefill chunks), each in
    scheduling order. A slot is ``block * block_size + offset``.
    """

    block_size: int
    """Slots a block."""
    token_ids: NDArray[np.int32]
    """[T] tokens to compute, sequence after sequence."""
    positions: NDArray[np.int32]
    """[T] place of each token in its sequence, from 0."""
    slots: NDArray[np.int32]
    """[T] where each token's key and value are written; no two are equal, none is in block 0."""
    query_starts: NDArray[np.int32]
    """[S + 1] sequence s owns tokens query_starts[s] : query_starts[s + 1]; never empty."""
    context_lens: NDArray[np.int32]
    """[S] tokens that the sequence's last token attends to, itself included."""
    block_tables: NDArray[np.int32]
    """[S, widest] physical blocks in order; padded with 0, the null block, which is never read."""
    decode_count: int
    """How many leading sequences have exactly one token."""
    logit_rows: NDArray[np.int32]
    """[L] rows of the T tokens after which a token is sampled, ascending; of each sequence its last ones."""
    prompt_rows: NDArray[np.int32]
    """[P] rows of the T tokens whose next token, of the prompt, is to be explained, ascending."""
    fed_rows: NDArray[np.int32]
    """[F] rows of the T tokens that the step before is still choosing; their ids are 0 here. Each is a sequence."""
    fed_from: NDArray[np.int32]
    """[F] which of the logit rows of the step before chooses each."""

    @property
    def token_count(self) -> int:
        """T."""
        return int(self.token_ids.size)

    @property
    def sequence_count(self) -> int:
        """S."""
        return int(self.context_lens.size)


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """A sequence's share of a plan, before flattening."""

    token_ids: NDArray[np.int32]
    """[n] tokens to compute."""
    start: int
    """Position of the first of them."""
    block_table: NDArray[np.int32]
    """Blocks that hold positions 0 to start + n - 1 (or more)."""
    logit_count: int
    """After how many of them, the last ones, a token is sampled."""
    prompt_rows: range = range(0)
    """Which of the n tokens are followed by a prompt token that is to be explained."""
    fed_from: int | None = None
    """Which logit row of the step before chooses its only token; None: its tokens are known."""


def build_plan(sequences: list[PlannedSequence], block_size: int) -> StepPlan:
    """Flatten sequences, already ordered (one-token ones first), into a plan."""
    lengths = np.fromiter((s.token_ids.size for s in sequences), dtype=np.int32, count=len(sequences))
    starts = np.fromiter((s.start for s in sequences), dtype=np.int32, count=len(sequences))
    query_starts = np.zeros(len(sequences) + 1, dtype=np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    context_lens = starts + lengths
    widths = -(-context_lens // block_size)
    block_tables = np.zeros((len(sequences), int(widths.max(initial=1))), dtype=np.int32)
    for row, (sequence, width) in enumerate(zip(sequences, widths, strict=True)):
        block_tables[row, :width] = sequence.block_table[:width]
    owner = np.repeat(np.arange(len(sequences), dtype=np.int32), lengths)
    offsets = np.arange(owner.size, dtype=np.int32) - query_starts[owner]
    positions = starts[owner] + offsets
    blocks = block_tables[owner, positions // block_size]
    firsts = query_starts.tolist()
    fed = [(row, s.fed_from) for row, s in zip(firsts, sequences, strict=False) if s.fed_from is not None]
    fed_rows, fed_from = np.array(fed, dtype=np.int32).reshape(-1, 2).T
    wanted = np.fromiter((s.logit_count for s in sequences), dtype=np.int32, count=len(sequences))
    return StepPlan(
        block_size=block_size,
        token_ids=np.concatenate([s.token_ids for s in sequences]),
        positions=positions,
        slots=blocks * np.int32(block_size) + positions % block_size,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=block_tables,
        decode_count=int((lengths == 1).sum()),
        logit_rows=_last_rows(query_starts[1:], wanted),
        prompt_rows=np.array(
            [start + row for s, start in zip(sequences, firsts, strict=False) for row in s.prompt_rows], dtype=np.int32
        ),
        fed_rows=fed_rows,
        fed_from=fed_from,
    )


def _last_rows(ends: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """The last ``counts[s]`` rows before each ``ends[s]``, one after the other."""
    closes = np.cumsum(counts, dtype=np.int32)
    return np.repeat(ends - closes, counts) + np.arange(closes[-1], dtype=np.int32)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logs of the raw softmax, finite and at most 0 (clipped at -9999), for one token."""

    logprob: float
    """Of the token that was chosen, or that the prompt goes on with."""
    top_ids: tuple[int, ...] = ()
    """The most likely tokens, most likely first; as many as were asked for."""
    top_logprobs: tuple[float, ...] = ()
    """Theirs, in the same order."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What came of one row that needed logits: a token, or an error that ends its request alone."""

    token_id: int
    """The chosen token; -1 with an error."""
    logprobs: TokenLogprobs | None = None
    """Present when the request asked for them."""
    error: str | None = None
    """Why no token could be chosen."""
