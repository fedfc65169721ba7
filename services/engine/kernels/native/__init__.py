"""The C++ extension: a whole step's layers as one operator, for bfloat16 and int8 on AVX2 and AVX-512.

``load`` builds it on first use (``build``) and says once why it cannot be used; ``NativeKernels`` prepares a plan
for it. The arithmetic has its plain twin in ``reference``; ``ops.cpp`` has the operators, ``layers.h`` the layers.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass

import torch

from services.engine.kernels.base import AttentionBatch
from services.engine.kernels.cpu import CpuKernels
from services.engine.kernels.native.build import NotBuilt, library
from services.engine.plan import StepPlan

_log = logging.getLogger("headrace.engine.native")
_FORCED = "HEADRACE_NATIVE_ISA"
_lock = threading.Lock()
_state: list[str | None] = []  # empty: not tried; [None]: loaded; [reason]: cannot be used here


@dataclass(frozen=True, slots=True)
class NativeBatch:
    """A plan's sequences as the operator reads them, int32."""

    query_starts: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor


class NativeKernels(CpuKernels):
    """What the runner asks of kernels beside ``NativeDecoder``: the batch; everything else is inside the operator."""

    def prepare(self, plan: StepPlan, dtype: torch.dtype) -> AttentionBatch:
        """Hand the plan's arrays over as they are."""
        del dtype
        return NativeBatch(
            torch.from_numpy(plan.query_starts),
            torch.from_numpy(plan.context_lens),
            torch.from_numpy(plan.block_tables),
        )


def load() -> str | None:
    """Make the operators available; None, or why that is not possible here. Builds at most once, logs at most once.

    Raises:
        ValueError: the environment asks for an instruction set that is not here.
    """
    with _lock:
        if not _state:
            try:
                torch.ops.load_library(str(library()))  # type: ignore[no-untyped-call]
                _use(os.environ.get(_FORCED, ""))
                _log.info("native kernels: %s", torch.ops.headrace.instruction_set())
                _state.append(None)
            except (NotBuilt, OSError, RuntimeError) as error:
                reason = str(error).splitlines()[0][:300]
                _log.warning("native kernels are not used, torch's own are: %s", reason)
                _state.append(reason)
        return _state[0]


def _use(name: str) -> None:
    """Compute as a lesser processor would; without a name: as this one can."""
    there: list[str] = torch.ops.headrace.instruction_sets()
    if name and name not in there:
        raise ValueError(f"{_FORCED} is {name!r}; here it must be one of {', '.join(there)}")
    torch.ops.headrace.use_instruction_set(name)


def fits(*, head_dim: int, hidden: int, inner: int) -> bool:
    """True when the operator computes a model of this shape."""
    return head_dim % 16 == 0 and hidden % 2 == 0 and inner % 2 == 0
