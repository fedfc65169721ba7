"""Arrays to a device and back. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(values: NDArray[np.generic[Any]], device: torch.device) -> torch.Tensor:
    """The array as a tensor there; on a CPU the same memory, to a GPU a copy that the host does not wait for."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def from_device(tensor: torch.Tensor) -> Callable[[], NDArray[Any]]:
    """Start one copy to the host that nobody waits for; the function returned waits for it."""
    if tensor.device.type == "cpu":
        return tensor.numpy
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch has no types here
    copied.record()

    def wait() -> NDArray[Any]:
        copied.synchronize()
        return copy.numpy()

    return wait
