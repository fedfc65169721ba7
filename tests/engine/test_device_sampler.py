"""A row gets on the device the token that it gets on the host."""

from __future__ import annotations

import os

import pytest
import torch

from services.engine.kernels.triton import unusable
from services.engine.request import SamplingParams
from services.engine.sampler import Sampler
from services.engine.step import LogitRow
from tests.engine.factories import make_request

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if unusable(DEVICE) is not None and not os.environ.get("CI"):
    pytest.skip(f"the GPU kernels cannot run here: {unusable(DEVICE)}", allow_module_level=True)

from services.engine.device_sampler import DeviceSampler

VOCABULARY = 1500
SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.3, seed=2),
    SamplingParams(temperature=2.0, top_k=1, seed=3),
    SamplingParams(temperature=1.5, top_k=40, seed=4),
    SamplingParams(temperature=1.2, top_p=0.7, seed=-5),
    SamplingParams(temperature=5.0, top_p=0.99, seed=6),  # the cut lies beyond the host's candidates
    SamplingParams(temperature=1.5, min_p=0.05, seed=7),
    SamplingParams(temperature=1.1, top_k=50, top_p=0.8, min_p=0.01, seed=8),
    SamplingParams(temperature=1e-4, top_p=0.5, seed=2**63 - 1),
    SamplingParams(temperature=1.0, seed=9, logprobs=3),  # brought to the host
    SamplingParams(temperature=0.0, logit_bias={7: 50.0}),  # too
]


def _rows(samplings: list[SamplingParams], length: int) -> list[LogitRow]:
    requests = [make_request(i, prompt=[5] * length, sampling=s) for i, s in enumerate(samplings)]
    return [LogitRow(request, request.token_count) for request in requests]


def test_every_row_gets_the_hosts_token() -> None:
    """Greedy, drawn and filtered rows, and such that need the host, in one batch, at several positions."""
    ours, hosts, generator = DeviceSampler(frozenset({2})), Sampler(frozenset({2})), torch.Generator().manual_seed(1)
    seen = set()
    for length in range(1, 9):
        logits = 3 * torch.randn((len(SAMPLINGS), VOCABULARY), generator=generator)
        rows = _rows(SAMPLINGS, length)
        found = ours.sample(logits.to(DEVICE), rows)
        assert [s.token_id for s in found] == [s.token_id for s in hosts.sample(logits.clone(), rows)]
        assert [s.logprobs is not None for s in found] == [row.request.sampling.logprobs is not None for row in rows]
        seen.update(s.token_id for s in found)
    assert len(seen) > 4 * len(SAMPLINGS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_that_is_not_finite_ends_alone(dtype: torch.dtype) -> None:
    """NaN, +inf and a row of -inf alone are errors; the others get their tokens."""
    logits = torch.randn((5, VOCABULARY), generator=torch.Generator().manual_seed(2)).to(dtype)
    logits[0, 3], logits[1, 3], logits[2] = float("nan"), float("inf"), float("-inf")
    rows = _rows([SamplingParams(temperature=t, seed=1) for t in (1.0, 0.0, 1.0, 1.0, 0.0)], 3)
    found = DeviceSampler(frozenset()).sample(logits.to(DEVICE), rows)
    assert [s.error for s in found] == ["the logits are not finite"] * 3 + [None] * 2
    assert found[4].token_id == int(logits[4].float().argmax())
    assert found[3].token_id == Sampler(frozenset()).sample(logits[3:4].float(), rows[3:4])[0].token_id
