"""Row-wise operations in Triton: normalisation, gating, rotation with the KV write. One pass over memory each."""

import torch
import triton
import triton.language as tl

GATE_WIDTH = 1024
_LARGEST, _SMALLEST = tl.constexpr(127.0), tl.constexpr(1e-30)  # of ``kv_int8``
_ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it has no room for fractions


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square normalisation of [T, W] or [T, heads, W], the last dimension dense; a new dense tensor."""
    out = x.new_empty(x.shape)
    rows = x.unsqueeze(1) if x.dim() == 2 else x
    count, heads, width = rows.shape
    _rms_norm[(count, heads)](
        rows,
        weight,
        out,
        rows.stride(0),
        rows.stride(1),
        eps,
        WIDTH=width,
        PADDED=triton.next_power_of_2(width),
    )
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2 * inner] dense → silu(first half) * second half, a new [T, inner]."""
    count, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((count, inner))
    _silu_mul[(count, triton.cdiv(inner, GATE_WIDTH))](gate_up, out, inner, WIDTH=GATE_WIDTH)
    return out


def rotate_and_store(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layer_kv: torch.Tensor, slots: torch.Tensor
) -> None:
    """Rotate queries and keys of a dense [T, Hq + 2 Hkv, D] in place; store keys and values at slots [T] int64.

    A pool of int8 is given codes and scales, as ``kv_int8`` makes them.
    """
    count, heads, dim = qkv.shape
    kv_heads = layer_kv.shape[3]
    _rotate_and_store[(count, heads)](
        qkv,
        cos,
        sin,
        layer_kv,
        scales_of(layer_kv),
        slots,
        QUERIES=heads - 2 * kv_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        WIDTH=triton.next_power_of_2(dim // 2),
        KEPT=layer_kv.shape[4],
        CODES=layer_kv.dtype is torch.int8,
    )


def scales_of(layer_kv: torch.Tensor) -> torch.Tensor:
    """The memory of a pool of int8 as float32, every W / 4th of which is a scale; any other pool as it is."""
    return layer_kv.view(torch.float32) if layer_kv.dtype is torch.int8 else layer_kv


@triton.jit
def _rms_norm(x, weight, out, row_stride, head_stride, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, PADDED)
    there = place < WIDTH
    values = tl.load(x + row * row_stride + head * head_stride + place, mask=there, other=0.0).to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values, 0) / WIDTH + eps)
    scaled = scaled.to(out.dtype.element_ty).to(tl.float32)  # rounded before the weight, as in the model's own code
    gain = tl.load(weight + place, mask=there, other=0.0).to(tl.float32)
    at = (row * tl.num_programs(1) + head) * WIDTH + place
    tl.store(out + at, (scaled * gain).to(out.dtype.element_ty), mask=there)


@triton.jit
def _silu_mul(gate_up, out, inner, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = place < inner
    gate = tl.load(gate_up + row * 2 * inner + place, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * inner + inner + place, mask=there, other=0.0).to(tl.float32)
    tl.store(out + row * inner + place, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=there)


@triton.jit
def _code(value):
    rounded = (value + _ROUNDER) - _ROUNDER  # to the nearest, of two the even one
    return tl.where(rounded == rounded, rounded, 0.0).to(tl.int8)


@triton.jit
def _rotate_and_store(
    qkv,
    cos,
    sin,
    kv,
    scales,
    slots,
    QUERIES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    CODES: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = tl.arange(0, WIDTH)
    there = place < HALF
    at = qkv + (row * (QUERIES + 2 * KV_HEADS) + head) * (2 * HALF) + place
    first = tl.load(at, mask=there, other=0.0)
    second = tl.load(at + HALF, mask=there, other=0.0)
    if head < QUERIES + KV_HEADS:
        turn = row * (2 * HALF) + place
        low, high = first.to(tl.float32), second.to(tl.float32)
        cos_low = tl.load(cos + turn, mask=there, other=0.0).to(tl.float32)
        sin_low = tl.load(sin + turn, mask=there, other=0.0).to(tl.float32)
        cos_high = tl.load(cos + turn + HALF, mask=there, other=0.0).to(tl.float32)
        sin_high = tl.load(sin + turn + HALF, mask=there, other=0.0).to(tl.float32)
        first = (low * cos_low + high * sin_low).to(qkv.dtype.element_ty)
        second = (high * cos_high + low * sin_high).to(qkv.dtype.element_ty)
        tl.store(at, first, mask=there)
        tl.store(at + HALF, second, mask=there)
    if head >= QUERIES:
        target = tl.load(slots + row) * (2 * KV_HEADS) + head - QUERIES
        stored = kv + target * KEPT + place
        if CODES:
            low, high = first.to(tl.float32), second.to(tl.float32)
            largest = tl.maximum(tl.max(tl.abs(low), 0), tl.max(tl.abs(high), 0))
            broken = tl.sum((low != low).to(tl.int32) + (high != high).to(tl.int32), 0)
            largest = tl.where(broken > 0, float("nan"), largest)
            inverse = tl.where(largest > _SMALLEST, _LARGEST / tl.maximum(largest, _SMALLEST), 0.0)
            tl.store(stored, _code(low * inverse), mask=there)
            tl.store(stored + HALF, _code(high * inverse), mask=there)
            tl.store(scales + target * (KEPT // 4) + HALF // 2, largest / _LARGEST)
        else:
            tl.store(stored, first, mask=there)
            tl.store(stored + HALF, second, mask=there)
