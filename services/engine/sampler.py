"""Chooses the next token of each row of logits.

Knows requests' sampling parameters and known tokens; nothing of the model or the schedule. Order: raw logprobs →
bias, allowed, bad sequences, min_tokens → penalties → temperature → min_p → top_k → top_p → draw. A row depends
on no other row, and a row that fails ends alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.engine.drawing import draw
from services.engine.plan import Sampled, TokenLogprobs
from services.engine.step import LogitRow

LOWEST_LOGPROB = -9999.0
NOT_FINITE = "the logits are not finite"
NOTHING_LEFT = "no token is left to choose from"


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens that are being chosen."""

    ids: torch.Tensor
    """[L] int64 where the logits are, negative where none could be chosen; of a step that is foreseeable alone."""
    wait: Callable[[], list[Sampled]]
    """Gives them to the host, when they are chosen. To be called once."""


class Sampler:
    """Greedy and random choice with every parameter of SamplingParams."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos = eos_token_ids

    def begin(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> Choice:
        """Begin to choose one token a row; arguments as of ``sample``. On a CPU this is all of it."""
        return chosen(self.sample(logits, rows) if rows else [])

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> list[Sampled]:
        """Choose one token a row.

        Args:
            logits: [L, vocabulary] raw; may be overwritten.
            rows: [L] whose they are, and after which tokens.

        Returns:
            [L] tokens, or the error that ends that row's request.
        """
        if all(row.request.sampling.greedy and row.untouched for row in rows):
            peaks, ids = logits.max(dim=-1)
            return [
                Sampled(token) if math.isfinite(peak) else failed(NOT_FINITE)
                for token, peak in zip(ids.tolist(), peaks.tolist(), strict=True)
            ]
        return [self._sample_row(one, row) for one, row in zip(logits.float(), rows, strict=True)]

    def _sample_row(self, logits: torch.Tensor, row: LogitRow) -> Sampled:
        """Choose by [vocabulary] float32 logits on the CPU, which are overwritten."""
        values, s = logits.numpy(), row.request.sampling
        if not math.isfinite(values.max()):
            return failed(NOT_FINITE)
        raw = logits.clone() if s.logprobs is not None else None
        try:
            self._shape(logits, row)
        except Exception as error:  # noqa: BLE001 - one row's failure must not end the others
            return failed(f"shaping the logits failed: {error}")
        peak = values.max()
        if not math.isfinite(peak):
            return failed(NOTHING_LEFT)
        try:
            token = int(values.argmax()) if s.greedy else _drawn(values, peak, row)
        except Exception as error:  # noqa: BLE001 - as above
            return failed(f"drawing a token failed: {error}")
        return Sampled(token, explain(raw, token, s.logprobs or 0) if raw is not None else None)

    def _shape(self, logits: torch.Tensor, row: LogitRow) -> None:
        """Bias, allowed, bad sequences, min_tokens, penalties: on one row, in place."""
        sampling = row.request.sampling
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64)
            logits.index_add_(0, ids, torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype))
        if sampling.allowed_token_ids is not None:
            ids = torch.tensor(sampling.allowed_token_ids, dtype=torch.int64)
            kept = logits[ids]
            logits.fill_(-math.inf)
            logits[ids] = kept
        banned = banned_ids(row, self._eos)
        if banned:
            logits[torch.tensor(sorted(banned), dtype=torch.int64)] = -math.inf
        _penalise(logits, row)


def _drawn(logits: NDArray[np.float32], peak: np.float32, row: LogitRow) -> int:
    s = row.request.sampling
    # Relative to the peak before dividing: a tiny temperature gives -inf, never inf - inf.
    values = (logits - peak) / np.float32(s.temperature)
    return draw(values, s, row.request.seed, row.token_count)


@torch.inference_mode()
def explain(raw: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Log probabilities of one token, and of the ``count`` most likely ones, by [vocabulary] raw logits.

    Raises:
        ValueError: the logits are not finite.
    """
    values = raw.float() - raw.max()
    logprobs = values.log_softmax(dim=-1)
    chosen = float(logprobs[token_id])
    if math.isnan(chosen):
        raise ValueError(NOT_FINITE)
    top_ids = _most_likely(values, min(count, values.shape[0]))
    return TokenLogprobs(
        logprob=min(0.0, max(LOWEST_LOGPROB, chosen)),
        top_ids=tuple(top_ids.tolist()),
        top_logprobs=tuple(logprobs[top_ids].clamp_(min=LOWEST_LOGPROB, max=0.0).tolist()),
    )


def _most_likely(values: torch.Tensor, count: int) -> torch.Tensor:
    """[count] ids by their values, the highest first; of equal ones the lowest ids."""
    if not count:
        return torch.empty(0, dtype=torch.int64)
    ids = (values >= values.topk(count).values[-1]).nonzero().squeeze(-1)
    return ids[values[ids].sort(descending=True, stable=True).indices[:count]]


def chosen(sampled: list[Sampled]) -> Choice:
    """A choice that is made."""
    return Choice(torch.tensor([one.token_id for one in sampled], dtype=torch.int64), lambda: sampled)


def failed(text: str) -> Sampled:
    """What a row without a token gives."""
    return Sampled(token_id=-1, error=text)


def banned_ids(row: LogitRow, eos_token_ids: frozenset[int]) -> set[int]:
    """Last tokens of bad sequences whose beginning has just been generated; what would end before min_tokens."""
    banned: set[int] = set()
    request, output = row.request, row.output
    for sequence in request.sampling.bad_sequences:
        if not sequence:
            continue
        head = sequence[:-1]
        if len(head) <= output.size and (not head or output[-len(head) :].tolist() == list(head)):
            banned.add(sequence[-1])
    if output.size < request.sampling.min_tokens:
        banned |= request.stop_token_ids
        if not request.ignore_eos:
            banned |= eos_token_ids
    return banned


def _penalise(logits: torch.Tensor, row: LogitRow) -> None:
    """Repetition over prompt and output (Keskar et al., CTRL, 2019); presence and frequency over the output."""
    s = row.request.sampling
    if s.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(row.tokens)).long()
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
    if (s.presence_penalty or s.frequency_penalty) and row.output.size:
        used, counts = np.unique(row.output, return_counts=True)
        penalty = torch.from_numpy(counts).to(logits.dtype) * s.frequency_penalty + s.presence_penalty
        logits[torch.from_numpy(used).long()] -= penalty
