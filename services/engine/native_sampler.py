"""The sampler inside the C++ extension: every row of a step in one call, a thread a row.

It chooses what ``Sampler`` chooses: see ``drawing`` for how that can be, and ``kernels/native/sampler_row.h`` for how
it is done without sorting a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from services.engine.plan import Sampled, TokenLogprobs
from services.engine.sampler import NOT_FINITE, NOTHING_LEFT, Sampler, banned_ids, failed
from services.engine.step import LogitRow

_ERRORS = {-1: NOT_FINITE, -2: NOTHING_LEFT, -3: "shaping the logits failed: a token id is outside the vocabulary"}
_NO_IDS, _NO_BIASES = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.float32)
_LISTS = 4  # of ids, a row: biased, allowed, banned, known tokens


class NativeSampler(Sampler):
    """A sampler of logits on the CPU, for machines that have the extension."""

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> list[Sampled]:
        """Choose one token a row; as ``Sampler.sample``."""
        if all(row.request.sampling.greedy and row.untouched for row in rows):
            tokens, *_ = torch.ops.headrace.sample(logits.float(), *_plain(len(rows)))
            return _sampled(tokens)
        numbers = np.array([_numbers(row) for row in rows])
        counts = np.array([_counts(row) for row in rows], dtype=np.int64)
        ends, ids, biases = self._lists(rows)
        tokens, logprobs, top_ids, top_logprobs = torch.ops.headrace.sample(
            logits.float(), torch.from_numpy(numbers), torch.from_numpy(counts), ends, ids, biases
        )
        results = _sampled(tokens)
        for place, row in enumerate(rows):
            wanted = row.request.sampling.logprobs
            if wanted is not None and results[place].error is None:
                results[place] = Sampled(
                    results[place].token_id,
                    TokenLogprobs(
                        float(logprobs[place]),
                        tuple(top_ids[place, :wanted].tolist()),
                        tuple(top_logprobs[place, :wanted].tolist()),
                    ),
                )
        return results

    def _lists(self, rows: Sequence[LogitRow]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Where each list of ids of each row ends, the ids, and the biases."""
        ends = np.zeros((len(rows), _LISTS), dtype=np.int64)
        if not any(row.shaped for row in rows):
            return torch.from_numpy(ends), _NO_IDS, _NO_BIASES
        lists: list[Sequence[int] | np.ndarray[tuple[int], np.dtype[np.int32]]] = []
        biases: list[float] = []
        for row in rows:
            s = row.request.sampling
            biases += s.logit_bias.values()
            lists += [
                list(s.logit_bias),
                s.allowed_token_ids or (),
                sorted(banned_ids(row, self._eos)),
                row.tokens if s.penalised else (),
            ]
        np.cumsum([len(one) for one in lists], out=ends.reshape(-1))
        ids = np.concatenate([np.asarray(one, dtype=np.int32) for one in lists])
        return torch.from_numpy(ends), torch.from_numpy(ids), torch.tensor(biases, dtype=torch.float32)


def _sampled(tokens: torch.Tensor) -> list[Sampled]:
    return [Sampled(token) if token >= 0 else failed(_ERRORS[token]) for token in tokens.tolist()]


@functools.cache
def _plain(count: int) -> tuple[torch.Tensor, ...]:
    """What is asked of so many rows of which the most likely tokens are wanted and nothing else."""
    numbers = torch.tensor([[0.0, 1.0, -math.inf, 1.0, 0.0, 0.0]], dtype=torch.float64).repeat(count, 1)
    counts = torch.tensor([[0, 0, 0, -1, 0, 0]], dtype=torch.int64).repeat(count, 1)
    return numbers, counts, torch.zeros((count, _LISTS), dtype=torch.int64), _NO_IDS, _NO_BIASES


def _numbers(row: LogitRow) -> tuple[float, ...]:
    """Temperature, top_p, log of min_p, penalties."""
    s = row.request.sampling
    temperature = 0.0 if s.greedy else s.temperature
    lowest = math.log(s.min_p) if s.min_p > 0 else -math.inf
    return temperature, s.top_p, lowest, s.repetition_penalty, s.presence_penalty, s.frequency_penalty


def _counts(row: LogitRow) -> tuple[int, ...]:
    """Seed, position, top_k, top log probabilities, prompt tokens, whether others than the allowed are ruled out."""
    request, s = row.request, row.request.sampling
    explained = -1 if s.logprobs is None else s.logprobs
    return request.seed, row.token_count, s.top_k, explained, request.prompt_count, s.allowed_token_ids is not None
