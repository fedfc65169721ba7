"""Keys and values as bytes: the D numbers of one token and one head as codes, and behind them the scale they share.

A row of a pool is [D + SCALE_BYTES] int8. A number is code * scale, and the largest of the D became 127; so a row
depends on its token alone, and a block can be shared, copied and freed without a look into it.
"""

from __future__ import annotations

import torch

SCALE_BYTES = 4  # one float32
_LARGEST = 127
_SMALLEST = 1e-30  # of a row's largest number; below, all codes are zero


def row_width(dim: int, dtype: torch.dtype) -> int:
    """Elements that a pool of this dtype has for D numbers."""
    return dim + SCALE_BYTES if dtype is torch.int8 else dim


def to_rows(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[..., D] keys or values as a pool of this dtype keeps them; NaN and infinity spoil the row, as they should."""
    if dtype is not torch.int8:
        return x
    wide = x.float()
    largest = wide.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest > _SMALLEST, _LARGEST / largest, 0)
    return torch.cat([(wide * inverse).round().to(torch.int8), (largest / _LARGEST).view(torch.int8)], dim=-1)


def from_rows(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The [..., D] numbers of a pool's rows; rows of another dtype than int8 are handed back as they are."""
    if rows.dtype is not torch.int8:
        return rows
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (rows[..., :-SCALE_BYTES].float() * scale).to(dtype)
