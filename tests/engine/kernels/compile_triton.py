"""Compiles every GPU kernel to machine code, without a GPU: `python -m tests.engine.kernels.compile_triton 80 90`.

The arguments are compute capabilities. A process of its own, because in the tests' process Triton interprets.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from services.engine.kernels.kv_int8 import row_width
from services.engine.kernels.triton import attention, draw, rows

_TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32"}
_TYPES |= {torch.int64: "*i64", torch.int8: "*i8"}


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _aligned(name: str, values: dict[str, Any], constants: dict[str, Any]) -> bool:
    """What a launch finds out by itself: tensors, and numbers divisible by 16."""
    value = values[name]
    return name not in constants and (isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0))


class Compiler:
    """Stands in for launches: compiles what would be launched."""

    def __init__(self, capabilities: list[int]) -> None:
        self._targets = [GPUTarget("cuda", capability, 32) for capability in capabilities]

    def launch(self, kernel: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        """Compile a kernel for arguments of these types."""
        del grid, warmup
        names = [parameter.name for parameter in kernel.params]
        values = dict(zip(names, args, strict=False)) | constants
        signature = {name: "constexpr" if name in constants else _type(values[name]) for name in names}
        aligned = {
            (names.index(name),): [["tt.divisibility", 16]] for name in names if _aligned(name, values, constants)
        }
        places = {(names.index(name),): value for name, value in constants.items()}
        source = ASTSource(kernel, signature, places, aligned)
        for target in self._targets:
            compiled = triton.compile(source, target=target)
            size, shared = len(compiled.asm["cubin"]), compiled.metadata.shared
            print(f"{kernel.fn.__name__} sm_{target.arch}: {size} bytes, {shared} of shared memory")  # noqa: T201


def compile_all(dtype: torch.dtype) -> None:
    """Launch everything once, on tensors of a Llama-3-8B's shapes."""
    for kv_dtype in (dtype, torch.int8):
        compile_over(kv_dtype, dtype)
    rows.rms_norm(torch.zeros(4, 4096, dtype=dtype), torch.zeros(4096, dtype=dtype), 1e-5)
    rows.silu_mul(torch.zeros(4, 2 * 14336, dtype=dtype))


def compile_over(kv_dtype: torch.dtype, dtype: torch.dtype) -> None:
    """Launch what reads or writes a pool of this dtype."""
    heads, kv_heads, dim = 32, 8, 128
    qkv = torch.zeros(4, heads + 2 * kv_heads, dim, dtype=dtype)
    pool = torch.zeros(2, 16, 2, kv_heads, row_width(dim, kv_dtype), dtype=kv_dtype)
    places = [torch.zeros(shape, dtype=torch.int32) for shape in ((4, 2), (5,), (4,), (4, 2))]
    out = torch.empty(4, heads * dim, dtype=dtype)
    attention.attend(qkv[:, :heads], pool, out, *places, rows=attention.decode_rows(4), splits=16)
    attention.attend(qkv[:, :heads], pool, out, *places, rows=attention.chunk_rows(4), splits=1)
    turn = torch.zeros(4, 1, dim, dtype=dtype)
    rows.rotate_and_store(qkv, turn, turn, pool, torch.zeros(4, dtype=torch.int64))


if __name__ == "__main__":
    compiler = Compiler([int(argument) for argument in sys.argv[1:]])
    JITFunction.run = lambda *args, **options: compiler.launch(*args, **options)  # noqa: PLW0108 - becomes a method
    compile_all(torch.bfloat16)
    draw.draw(torch.zeros(4, 32000), torch.zeros(4, dtype=torch.int64), -25.0)
