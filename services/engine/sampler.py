"""Chooses the next token of each row of logits.

Knows requests' sampling parameters and known tokens; nothing of the model or the schedule. Order: raw logprobs →
bias, allowed, bad sequences, min_tokens → penalties → temperature → min_p → top_k → top_p → draw. A row depends
on no other row, and a row that fails ends alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from services.engine.plan import Sampled, TokenLogprobs
from services.engine.randomness import gumbel
from services.engine.request import Request
from services.engine.step import LogitRow

LOWEST_LOGPROB = -9999.0
NOT_FINITE = "the logits are not finite"
NEGLIGIBLE = 25.0  # logits this far below the peak, 1e-11 of its probability, are never drawn
_CANDIDATES = 512  # most likely tokens looked at first; a row that needs more is sorted whole


class Sampler:
    """Greedy and random choice with every parameter of SamplingParams."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos = eos_token_ids

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> list[Sampled]:
        """Choose one token a row.

        Args:
            logits: [L, vocabulary] raw; may be overwritten.
            rows: [L] whose they are, and after which tokens.

        Returns:
            [L] tokens, or the error that ends that row's request.
        """
        if all(row.request.sampling.greedy and untouched(row) for row in rows):
            peaks, ids = logits.max(dim=-1)
            return [
                Sampled(token) if math.isfinite(peak) else _failed(NOT_FINITE)
                for token, peak in zip(ids.tolist(), peaks.tolist(), strict=True)
            ]
        return self._sample_any(logits.float(), rows)

    def _sample_any(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> list[Sampled]:
        results: list[Sampled | None] = [None] * len(rows)
        raw: dict[int, torch.Tensor] = {}
        for place, (row, peak) in enumerate(zip(rows, logits.amax(dim=-1).tolist(), strict=True)):
            if not math.isfinite(peak):
                results[place] = _failed(NOT_FINITE)
                continue
            if row.request.sampling.logprobs is not None:
                raw[place] = logits[place].clone()
            try:
                self._shape(logits[place], row)
            except Exception as error:  # noqa: BLE001 - one row's failure must not end the others
                results[place] = _failed(f"shaping the logits failed: {error}")
        peaks, best = logits.max(dim=-1)
        for place, (row, peak) in enumerate(zip(rows, peaks.tolist(), strict=True)):
            if results[place] is None and not math.isfinite(peak):
                results[place] = _failed("no token is left to choose from")
            elif results[place] is None and row.request.sampling.greedy:
                results[place] = Sampled(int(best[place]))
        self._draw([place for place, result in enumerate(results) if result is None], logits, rows, results)
        return [self._explain(result, raw.get(place), rows[place].request) for place, result in enumerate(results)]

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

    def _draw(
        self,
        places: list[int],
        logits: torch.Tensor,
        rows: Sequence[LogitRow],
        results: list[Sampled | None],
    ) -> None:
        """Fill in the results of random rows."""
        if not places:
            return
        scaled = logits[places]
        temperatures = torch.tensor(
            [[rows[place].request.sampling.temperature] for place in places], dtype=scaled.dtype
        )
        # Relative to the peak before dividing: a tiny temperature gives -inf, never inf - inf.
        scaled.sub_(scaled.amax(dim=-1, keepdim=True)).div_(temperatures)
        totals = torch.logsumexp(scaled, dim=-1).tolist()
        values, ids = scaled.topk(min(_CANDIDATES, scaled.shape[-1]), dim=-1)
        rows_of, values_of, ids_of = scaled.numpy(), values.numpy(), ids.numpy()
        for index, place in enumerate(places):
            try:
                token = _choose(rows[place], rows_of[index], values_of[index], ids_of[index], totals[index])
                results[place] = Sampled(token)
            except Exception as error:  # noqa: BLE001 - one row's failure must not end the others
                results[place] = _failed(f"drawing a token failed: {error}")

    def _explain(self, result: Sampled | None, raw: torch.Tensor | None, request: Request) -> Sampled:
        """Add logprobs of the raw softmax where they were asked for."""
        if result is None:
            return _failed("the row was not sampled")
        wanted = request.sampling.logprobs
        if raw is None or wanted is None or result.error is not None:
            return result
        return Sampled(result.token_id, explain(raw, result.token_id, wanted))


@torch.inference_mode()
def explain(raw: torch.Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Log probabilities of one token, and of the ``count`` most likely ones, by [vocabulary] raw logits.

    Raises:
        ValueError: the logits are not finite.
    """
    logprobs = raw.float().log_softmax(dim=-1)
    chosen = float(logprobs[token_id])
    if math.isnan(chosen):
        raise ValueError(NOT_FINITE)
    top_values, top_ids = logprobs.topk(min(count, logprobs.shape[0]))
    return TokenLogprobs(
        logprob=min(0.0, max(LOWEST_LOGPROB, chosen)),
        top_ids=tuple(top_ids.tolist()),
        top_logprobs=tuple(top_values.clamp_(min=LOWEST_LOGPROB, max=0.0).tolist()),
    )


def untouched(row: LogitRow) -> bool:
    """Nothing changes or explains the logits, whatever is then chosen by them."""
    s = row.request.sampling
    return (
        s.logprobs is None
        and not s.logit_bias
        and s.allowed_token_ids is None
        and not s.bad_sequences
        and row.output.size >= s.min_tokens
        and s.repetition_penalty == 1.0
        and s.presence_penalty == 0.0
        and s.frequency_penalty == 0.0
    )


def _failed(text: str) -> Sampled:
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


def _choose(
    row: LogitRow,
    scaled: NDArray[np.float32],
    values: NDArray[np.float32],
    ids: NDArray[np.int64],
    total: float,
) -> int:
    """Filter and draw one row.

    Args:
        row: whose parameters apply.
        scaled: [vocabulary] logits over temperature, the highest 0.
        values: the most likely of them, descending.
        ids: theirs.
        total: log of the sum of exponentials of all of ``scaled``.
    """
    s = row.request.sampling
    top_k = s.top_k if 0 < s.top_k < scaled.size else 0
    if not top_k and s.min_p <= 0 and s.top_p >= 1:
        return _pick(scaled, np.flatnonzero(scaled > -NEGLIGIBLE), row)
    kept = _kept(values, top_k, s.min_p, s.top_p, total)
    # The candidates are enough when the cut falls inside them, and not within a tie that may go on outside.
    if kept is None or values[kept - 1] == values[-1]:
        ranked = np.sort(scaled)[::-1]
        kept = _kept(ranked, top_k, s.min_p, s.top_p, total) or ranked.size
        lowest = ranked[kept - 1]
        above = np.flatnonzero(scaled > lowest)
        ties = np.flatnonzero(scaled == lowest)[: kept - above.size]  # a tie is cut by id
        survivors = np.concatenate([above, ties])
    else:
        survivors = ids[:kept]
    return _pick(scaled, survivors, row)


def _kept(values: NDArray[np.float32], top_k: int, min_p: float, top_p: float, total: float) -> int | None:
    """How many of the descending ``values`` survive min_p, top_k and top_p; None when the cut lies beyond."""
    count = values.size
    if min_p > 0:
        count = int(np.searchsorted(-values, -math.log(min_p), side="right"))
    if top_k:
        count = min(count, top_k)
    count = max(count, 1)
    inside = count < values.size
    if top_p < 1:
        mass = np.cumsum(np.exp(values[:count]), dtype=np.float64)
        goal = top_p * (mass[-1] if inside else math.exp(total))
        reached = int(np.searchsorted(mass, goal, side="left")) + 1
        if reached <= count:
            return reached
        return count if inside else None
    return count if inside else None


def _pick(scaled: NDArray[np.float32], token_ids: NDArray[np.int64], row: LogitRow) -> int:
    """Draw one of the ids from the softmax of their logits.

    Each id has noise of its own, and the highest sum wins: rounding of the logits moves the choice only when the two
    best sums nearly tie. (Along cumulated probabilities it moves every boundary after it, and among thousands of
    unlikely tokens there is always one nearby.)
    """
    noise = gumbel(row.request.seed, row.tokens.size, token_ids)
    return int(token_ids[np.argmax(scaled[token_ids] + noise)])
