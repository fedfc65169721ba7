"""Chooses the next token of each row of logits.

Knows requests' sampling parameters and known tokens; nothing of the model or the schedule. Order: raw logprobs →
bias, allowed, bad sequences, min_tokens → penalties → temperature → min_p → top_k → top_p → draw. A row depends
on no other row, and a row that fails ends alone.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from services.engine.plan import Sampled, TokenLogprobs
from services.engine.randomness import gumbel
from services.engine.request import Request

LOWEST_LOGPROB = -9999.0
NOT_FINITE = "the logits are not finite"
NEGLIGIBLE = 25.0  # logits this far below the peak, 1e-11 of its probability, are never drawn
_CANDIDATES = 512  # most likely tokens looked at first; a row that needs more is sorted whole


class Sampler:
    """Greedy and random choice with every parameter of SamplingParams."""

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos = eos_token_ids

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, requests: list[Request]) -> list[Sampled]:
        """Choose one token a row.

        Args:
            logits: [L, vocabulary] raw; may be overwritten.
            requests: [L] their owners, with every known token.

        Returns:
            [L] tokens, or the error that ends that row's request.
        """
        if all(request.sampling.greedy and untouched(request) for request in requests):
            peaks, ids = logits.max(dim=-1)
            return [
                Sampled(token) if math.isfinite(peak) else _failed(NOT_FINITE)
                for token, peak in zip(ids.tolist(), peaks.tolist(), strict=True)
            ]
        return self._sample_any(logits.float(), requests)

    def _sample_any(self, logits: torch.Tensor, requests: list[Request]) -> list[Sampled]:
        results: list[Sampled | None] = [None] * len(requests)
        raw: dict[int, torch.Tensor] = {}
        for row, (request, peak) in enumerate(zip(requests, logits.amax(dim=-1).tolist(), strict=True)):
            if not math.isfinite(peak):
                results[row] = _failed(NOT_FINITE)
                continue
            if request.sampling.logprobs is not None:
                raw[row] = logits[row].clone()
            try:
                self._shape(logits[row], request)
            except Exception as error:  # noqa: BLE001 - one row's failure must not end the others
                results[row] = _failed(f"shaping the logits failed: {error}")
        peaks, best = logits.max(dim=-1)
        for row, (request, peak) in enumerate(zip(requests, peaks.tolist(), strict=True)):
            if results[row] is None and not math.isfinite(peak):
                results[row] = _failed("no token is left to choose from")
            elif results[row] is None and request.sampling.greedy:
                results[row] = Sampled(int(best[row]))
        self._draw([row for row, result in enumerate(results) if result is None], logits, requests, results)
        return [self._explain(result, raw.get(row), requests[row]) for row, result in enumerate(results)]

    def _shape(self, row: torch.Tensor, request: Request) -> None:
        """Bias, allowed, bad sequences, min_tokens, penalties: on one row, in place."""
        sampling = request.sampling
        if sampling.logit_bias:
            ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64)
            row.index_add_(0, ids, torch.tensor(list(sampling.logit_bias.values()), dtype=row.dtype))
        if sampling.allowed_token_ids is not None:
            ids = torch.tensor(sampling.allowed_token_ids, dtype=torch.int64)
            kept = row[ids]
            row.fill_(-math.inf)
            row[ids] = kept
        banned = _banned(request)
        if request.output_count < sampling.min_tokens:
            banned |= request.stop_token_ids
            if not request.ignore_eos:
                banned |= self._eos
        if banned:
            row[torch.tensor(sorted(banned), dtype=torch.int64)] = -math.inf
        _penalise(row, request)

    def _draw(
        self,
        rows: list[int],
        logits: torch.Tensor,
        requests: list[Request],
        results: list[Sampled | None],
    ) -> None:
        """Fill in the results of random rows."""
        if not rows:
            return
        scaled = logits[rows]
        temperatures = torch.tensor([[requests[row].sampling.temperature] for row in rows], dtype=scaled.dtype)
        # Relative to the peak before dividing: a tiny temperature gives -inf, never inf - inf.
        scaled.sub_(scaled.amax(dim=-1, keepdim=True)).div_(temperatures)
        totals = torch.logsumexp(scaled, dim=-1).tolist()
        values, ids = scaled.topk(min(_CANDIDATES, scaled.shape[-1]), dim=-1)
        rows_of, values_of, ids_of = scaled.numpy(), values.numpy(), ids.numpy()
        for index, row in enumerate(rows):
            request = requests[row]
            try:
                token = _choose(request, rows_of[index], values_of[index], ids_of[index], totals[index])
                results[row] = Sampled(token)
            except Exception as error:  # noqa: BLE001 - one row's failure must not end the others
                results[row] = _failed(f"drawing a token failed: {error}")

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


def untouched(request: Request) -> bool:
    """Nothing changes or explains the logits, whatever is then chosen by them."""
    s = request.sampling
    return (
        s.logprobs is None
        and not s.logit_bias
        and s.allowed_token_ids is None
        and not s.bad_sequences
        and request.output_count >= s.min_tokens
        and s.repetition_penalty == 1.0
        and s.presence_penalty == 0.0
        and s.frequency_penalty == 0.0
    )


def _failed(text: str) -> Sampled:
    return Sampled(token_id=-1, error=text)


def _banned(request: Request) -> set[int]:
    """Last tokens of bad sequences whose beginning has just been generated."""
    banned: set[int] = set()
    output = request.output_ids
    for sequence in request.sampling.bad_sequences:
        if not sequence:
            continue
        head = sequence[:-1]
        if len(head) <= output.size and (not head or output[-len(head) :].tolist() == list(head)):
            banned.add(sequence[-1])
    return banned


def _penalise(row: torch.Tensor, request: Request) -> None:
    """Repetition over prompt and output (Keskar et al., CTRL, 2019); presence and frequency over the output."""
    s = request.sampling
    if s.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(request.tokens.view)).long()
        logits = row[seen]
        row[seen] = torch.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
    if (s.presence_penalty or s.frequency_penalty) and request.output_count:
        used, counts = np.unique(request.output_ids, return_counts=True)
        penalty = torch.from_numpy(counts).to(row.dtype) * s.frequency_penalty + s.presence_penalty
        row[torch.from_numpy(used).long()] -= penalty


def _choose(
    request: Request,
    scaled: NDArray[np.float32],
    values: NDArray[np.float32],
    ids: NDArray[np.int64],
    total: float,
) -> int:
    """Filter and draw one row.

    Args:
        request: whose parameters apply.
        scaled: [vocabulary] logits over temperature, the highest 0.
        values: the most likely of them, descending.
        ids: theirs.
        total: log of the sum of exponentials of all of ``scaled``.
    """
    s = request.sampling
    top_k = s.top_k if 0 < s.top_k < scaled.size else 0
    if not top_k and s.min_p <= 0 and s.top_p >= 1:
        return _pick(scaled, np.flatnonzero(scaled > -NEGLIGIBLE), request)
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
    return _pick(scaled, survivors, request)


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


def _pick(scaled: NDArray[np.float32], token_ids: NDArray[np.int64], request: Request) -> int:
    """Draw one of the ids from the softmax of their logits.

    Each id has noise of its own, and the highest sum wins: rounding of the logits moves the choice only when the two
    best sums nearly tie. (Along cumulated probabilities it moves every boundary after it, and among thousands of
    unlikely tokens there is always one nearby.)
    """
    noise = gumbel(request.seed, request.token_count, token_ids)
    return int(token_ids[np.argmax(scaled[token_ids] + noise)])
