"""GPU kernels in Triton, behind the interface of ``base``; with ``TRITON_INTERPRET=1`` they run on a CPU, for tests.

``unusable`` says why they cannot be used here. Everything that needs the package ``triton`` is below this folder, and
nothing outside imports it before asking.
"""

from __future__ import annotations

import importlib.util
import os

import torch


def interpreted() -> bool:
    """True when Triton runs its kernels as Python on the CPU: slow, for tests alone."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def unusable(device: torch.device) -> str | None:
    """Why the kernels cannot compute on a device; None: they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type != "cuda" and not interpreted():
        return "there is no CUDA device, and TRITON_INTERPRET is not 1"
    return None
