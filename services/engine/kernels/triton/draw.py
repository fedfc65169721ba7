"""The draw of ``randomness`` on the GPU: for each row, the token whose logit plus Gumbel noise is highest.

The noise of a token is the same number as on the CPU, to the last rounding of two logarithms in float64: the third
round of the generator, which depends on the token, is computed here; the first two come in as the row's key.
"""

import torch
import triton
import triton.language as tl

WIDTH = 1024
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
_SECOND = tl.constexpr(0x94D049BB133111EB)


def draw(scaled: torch.Tensor, keys: torch.Tensor, lowest: float) -> torch.Tensor:
    """One token a row from the softmax of its logits.

    Args:
        scaled: [L, vocabulary] float32 dense, logits over temperature, each row's highest 0.
        keys: [L] int64, the rows' keys (``randomness.row_key``), as bits.
        lowest: logits at or below it are never drawn.

    Returns:
        [L] int64 token ids, on the same device; the host waits for nothing.
    """
    count, vocabulary = scaled.shape
    parts = triton.cdiv(vocabulary, WIDTH)
    best = scaled.new_empty((count, parts), dtype=torch.float64)
    ids = scaled.new_empty((count, parts), dtype=torch.int64)
    _draw[(count, parts)](scaled, keys, best, ids, vocabulary, lowest, WIDTH=WIDTH)
    return ids.gather(1, best.argmax(dim=1, keepdim=True)).squeeze(1)


@triton.jit
def _mix(values):
    values = (values ^ (values >> 30)) * _FIRST
    values = (values ^ (values >> 27)) * _SECOND
    return values ^ (values >> 31)


@triton.jit
def _draw(scaled, keys, best, ids, vocabulary, lowest, WIDTH: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * WIDTH + tl.arange(0, WIDTH)
    there = token < vocabulary
    logits = tl.load(scaled + row * vocabulary + token, mask=there, other=float("-inf"))
    key = tl.load(keys + row).to(tl.uint64, bitcast=True)
    bits = _mix((token.to(tl.uint64) * _GOLDEN) ^ key)
    uniform = ((bits >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16  # 2^-53
    sums = logits.to(tl.float64) - tl.log(-tl.log(uniform))
    sums = tl.where(logits > lowest, sums, float("-inf"))
    peak, place = tl.max(sums, 0, return_indices=True)
    tl.store(best + row * tl.num_programs(1) + part, peak)
    tl.store(ids + row * tl.num_programs(1) + part, (part * WIDTH + place).to(tl.int64))
