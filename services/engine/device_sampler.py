"""The sampler of a GPU: tokens are chosen where the logits are, and the host waits once a step, for the ids.

Greedy rows and draws with temperature, min_p, top_k and top_p stay on the device. Rows that need more (penalties, bias,
bans, log probabilities) are brought to the host and go through ``Sampler``. The draw is that of ``randomness``: a row
gets the token that it would get on a CPU from the same logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from services.engine.drawing import NEGLIGIBLE
from services.engine.kernels.triton.draw import draw
from services.engine.plan import Sampled
from services.engine.randomness import row_key
from services.engine.request import SamplingParams
from services.engine.sampler import NOT_FINITE, Choice, Sampler
from services.engine.step import LogitRow
from services.engine.transfer import from_device, to_device

_NO_TOKEN = -1
_NO_IDS = torch.empty(0, dtype=torch.int64)


class DeviceSampler(Sampler):
    """A sampler of logits on a GPU."""

    @torch.inference_mode()
    def begin(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> Choice:
        """Begin to choose one token a row, and to copy the ids to the host; rows that need the host wait for it."""
        here = [place for place, row in enumerate(rows) if row.untouched]
        rest = [place for place, row in enumerate(rows) if not row.untouched]
        ids = choose(_rows(logits, here), [rows[place] for place in here]) if here else _NO_IDS
        arrived = from_device(ids)
        others = _rows(logits, rest) if rest else None

        def wait() -> list[Sampled]:
            results = {place: _sampled(token) for place, token in zip(here, arrived().tolist(), strict=True)}
            if others is not None:
                sampled = super(DeviceSampler, self).sample(others.cpu(), [rows[place] for place in rest])
                results.update(zip(rest, sampled, strict=True))
            return [results[place] for place in range(len(rows))]

        return Choice(ids, wait)

    def sample(self, logits: torch.Tensor, rows: Sequence[LogitRow]) -> list[Sampled]:
        """Choose one token a row; as ``Sampler.sample``."""
        return self.begin(logits, rows).wait()


def _sampled(token_id: int) -> Sampled:
    return Sampled(token_id, error=NOT_FINITE if token_id == _NO_TOKEN else None)


def choose(logits: torch.Tensor, rows: Sequence[LogitRow]) -> torch.Tensor:
    """[L] int64 token ids on the device of the [L, vocabulary] logits, -1 where they are not finite; nobody waits."""
    peaks, ids = logits.max(dim=-1)
    drawn = [place for place, row in enumerate(rows) if not row.request.sampling.greedy]
    if drawn:
        random = [rows[place] for place in drawn]
        samplings = [row.request.sampling for row in random]
        temperatures = np.array([[s.temperature] for s in samplings], dtype=np.float32)
        scaled = _rows(logits, drawn).float()
        # Relative to the peak before dividing: a tiny temperature gives -inf, never inf - inf.
        scaled = (scaled - scaled.amax(dim=-1, keepdim=True)).div_(to_device(temperatures, logits.device))
        if any(map(_filters, samplings)):
            scaled = _filtered(scaled, samplings)
        keys = np.array([row_key(row.request.seed, row.token_count) for row in random], dtype=np.uint64).view(np.int64)
        winners = draw(scaled, to_device(keys, logits.device), -NEGLIGIBLE)
        ids = winners if len(drawn) == len(rows) else ids.index_copy(0, _index(drawn, logits.device), winners)
    return torch.where(peaks.isfinite(), ids, _NO_TOKEN)


def _filtered(scaled: torch.Tensor, samplings: Sequence[SamplingParams]) -> torch.Tensor:
    """The [L, vocabulary] logits with -inf at what min_p, then top_k, then top_p drop; a tie is cut by id."""
    device, size = scaled.device, scaled.shape[1]
    lowest = np.array([[math.log(s.min_p) if s.min_p > 0 else -math.inf] for s in samplings])
    most = np.array([[s.top_k if 0 < s.top_k < size else size] for s in samplings])
    mass = np.array([[s.top_p] for s in samplings])
    ranked, order = scaled.sort(dim=-1, descending=True, stable=True)
    count = (ranked.double() >= to_device(lowest, device)).sum(dim=-1, keepdim=True)
    count = torch.minimum(count, to_device(most, device)).clamp_(min=1)
    rank = torch.arange(size, device=device)
    reached = torch.where(rank < count, ranked.exp(), 0.0).double().cumsum(dim=-1)
    goal = reached[:, -1:] * to_device(mass, device)
    count = torch.minimum(count, (reached < goal).sum(dim=-1, keepdim=True) + 1)
    kept = torch.where(rank < count, ranked, -math.inf)
    return torch.empty_like(scaled).scatter_(1, order, kept)


def _filters(s: SamplingParams) -> bool:
    return s.min_p > 0 or s.top_k > 0 or s.top_p < 1


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == logits.shape[0] else logits.index_select(0, _index(rows, logits.device))


def _index(rows: list[int], device: torch.device) -> torch.Tensor:
    return to_device(np.array(rows, dtype=np.int64), device)
