"""Paged attention in Triton: one kernel for decoded tokens and for chunks, and one that joins what was split.

A program computes one tile of a sequence's queries for one key/value head: the query heads of that head are rows of one
matrix, so its keys and values are read once whatever the group. Decoded tokens have tiles of one token; their contexts
are split among programs (split-KV, as in Flash-Decoding, Dao et al., 2023), because few tokens alone do not fill a GPU.
Softmax is kept online (Milakov and Gimelshein, 2018), in float32 and in powers of two. A pool of int8 is multiplied as
codes, which any format of a product holds exactly; scores and weights take the scales.
"""

import torch
import triton
import triton.language as tl

from services.engine.kernels.triton import interpreted
from services.engine.kernels.triton.rows import scales_of

LOG2_E = 1.4426950408889634
DECODE_ROWS = 16  # the fewest rows that a matrix product of the hardware has
CHUNK_ROWS = 64
WIDEST_SPLIT = 32  # programs that share one context at most
TILE_BYTES = 16_384  # of the keys that a program has in its hands at once


def attend(
    q: torch.Tensor,
    layer_kv: torch.Tensor,
    out: torch.Tensor,
    tiles: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    rows: int,
    splits: int,
) -> None:
    """Attend with the queries of some tiles.

    Args:
        q: [T, Hq, D], the last dimension dense.
        layer_kv: [N, B, 2, Hkv, W], as in ``base``.
        out: [T, Hq * D], whose rows of these tiles are written.
        tiles: [tiles, 2] int32: the sequence, and the first of its T tokens; a tile has ``rows // group`` tokens.
        query_starts: [S + 1] int32.
        context_lens: [S] int32.
        block_tables: [S, widest] int32.
        rows: query rows a program, a power of two.
        splits: programs that share one context, a power of two; above 1, tile t is token t.
    """
    block_size, kv_heads = layer_kv.shape[1], layer_kv.shape[3]
    count, heads, dim = tiles.shape[0], q.shape[1], q.shape[2]
    part = out
    extremes = out
    if splits > 1:
        part = q.new_empty((splits, count, heads, dim), dtype=torch.float32)
        extremes = q.new_empty((splits, count, heads, 2), dtype=torch.float32)
    _attend[(count, kv_heads, splits)](
        q,
        layer_kv,
        scales_of(layer_kv),
        out,
        part,
        extremes,
        tiles,
        query_starts,
        context_lens,
        block_tables,
        q.stride(0),
        q.stride(1),
        block_tables.stride(0),
        LOG2_E * dim**-0.5,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        WIDTH=triton.next_power_of_2(dim),
        KEPT=layer_kv.shape[4],
        CODES=layer_kv.dtype is torch.int8,
        BLOCK=block_size,
        ROWS=rows,
        TILE=_tile(dim, q.dtype),
        SPLITS=splits,
        # Triton's interpreter has no arithmetic in bfloat16.
        PRODUCT=tl.float32 if interpreted() or q.dtype is torch.float32 else tl.bfloat16,
    )
    if splits > 1:
        _join[(count, heads)](
            part, extremes, out, HEADS=heads, DIM=dim, WIDTH=triton.next_power_of_2(dim), SPLITS=splits
        )


def split_count(tokens: int, kv_heads: int, processors: int) -> int:
    """How many programs share a context, so that there are two for each processor; whatever the contexts' lengths."""
    wanted = max(1, 2 * processors // max(1, tokens * kv_heads))
    return min(WIDEST_SPLIT, 1 << (wanted.bit_length() - 1))


def decode_rows(group: int) -> int:
    """Query rows of a decoded token's tile."""
    return max(DECODE_ROWS, int(triton.next_power_of_2(group)))


def chunk_rows(group: int) -> int:
    """Query rows of a chunk's tile."""
    return max(CHUNK_ROWS, int(triton.next_power_of_2(group)))


def _tile(dim: int, dtype: torch.dtype) -> int:
    """Places of a context that are looked at together; a product needs 16."""
    places = TILE_BYTES // (int(triton.next_power_of_2(dim)) * dtype.itemsize)
    return max(16, min(64, places))


@triton.jit(do_not_specialize=["table_stride"])  # it follows the longest context: no variant of its own for a 1
def _attend(
    q,
    kv,
    scales,
    out,
    part,
    extremes,
    tiles,
    query_starts,
    context_lens,
    tables,
    token_stride,
    head_stride,
    table_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    end = tl.load(query_starts + sequence + 1)
    offset = tl.load(context_lens + sequence) - end  # of a token's position from its row

    rows = tl.arange(0, ROWS)
    token = first + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    mine = (rows // GROUP < ROWS // GROUP) & (token < end)
    dims = tl.arange(0, WIDTH)
    there = dims < DIM
    at = token[:, None].to(tl.int64) * token_stride + head[:, None] * head_stride + dims[None, :]
    queries = tl.load(q + at, mask=mine[:, None] & there[None, :], other=0.0).to(PRODUCT)

    # Places that the tile's last token sees, and this split's share of them, in whole tiles.
    visible = offset + tl.minimum(first + ROWS // GROUP, end)
    share = tl.cdiv(tl.cdiv(visible, TILE), SPLITS) * TILE
    begin = split * share
    stop = tl.minimum(begin + share, visible)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(begin, stop, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < stop
        block = tl.load(tables + sequence.to(tl.int64) * table_stride + place // BLOCK, mask=inside, other=0)
        slot = block.to(tl.int64) * BLOCK + place % BLOCK
        at_slot = slot * (2 * KV_HEADS) + kv_head  # of the keys; that of the values is KV_HEADS later
        base = kv + at_slot * KEPT
        keys = tl.load(base[None, :] + dims[:, None], mask=inside[None, :] & there[:, None], other=0.0)
        values = tl.load(
            base[:, None] + KV_HEADS * KEPT + dims[None, :], mask=inside[:, None] & there[None, :], other=0.0
        )
        scores = tl.dot(queries, keys.to(PRODUCT), input_precision="ieee") * scale
        if CODES:
            scale_of = scales + at_slot * (KEPT // 4) + DIM // 4
            scores *= tl.load(scale_of, mask=inside, other=0.0)[None, :]
        seen = inside[None, :] & (place[None, :] <= (token + offset)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        peak = tl.maximum(top, tl.max(scores, 1))
        anchor = tl.where(peak == float("-inf"), 0.0, peak)  # a row that has seen nothing yet
        weights = tl.exp2(scores - anchor[:, None])
        fade = tl.exp2(top - anchor)
        total = total * fade + tl.sum(weights, 1)
        if CODES:
            weights *= tl.load(scale_of + KV_HEADS * (KEPT // 4), mask=inside, other=0.0)[None, :]
        mixed = mixed * fade[:, None] + tl.dot(weights.to(PRODUCT), values.to(PRODUCT), input_precision="ieee")
        top = peak

    kept = mine[:, None] & there[None, :]
    if SPLITS == 1:
        at = (token[:, None].to(tl.int64) * (KV_HEADS * GROUP) + head[:, None]) * DIM + dims[None, :]
        tl.store(out + at, (mixed / total[:, None]).to(out.dtype.element_ty), mask=kept)
    else:
        row = (split * tl.num_programs(0) + tile).to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(part + row[:, None] * DIM + dims[None, :], mixed, mask=kept)
        tl.store(extremes + 2 * row, top, mask=mine)
        tl.store(extremes + 2 * row + 1, total, mask=mine)


@triton.jit
def _join(
    part,
    extremes,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    token, head = tl.program_id(0), tl.program_id(1)
    split = tl.arange(0, SPLITS)
    dims = tl.arange(0, WIDTH)
    row = (split * tl.num_programs(0) + token).to(tl.int64) * HEADS + head
    tops = tl.load(extremes + 2 * row)  # -inf where a split had nothing to see; the first one always has
    weights = tl.exp2(tops - tl.max(tops, 0))
    total = tl.sum(weights * tl.load(extremes + 2 * row + 1), 0)
    parts = tl.load(part + row[:, None] * DIM + dims[None, :], mask=(dims < DIM)[None, :], other=0.0)
    mixed = tl.sum(parts * weights[:, None], 0) / total
    at = (token.to(tl.int64) * HEADS + head) * DIM + dims
    tl.store(out + at, mixed.to(out.dtype.element_ty), mask=dims < DIM)
