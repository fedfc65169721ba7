"""Arrays to a device. Knows nothing of what they mean."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(values: NDArray[np.generic[Any]], device: torch.device) -> torch.Tensor:
    """The array as a tensor there; on a CPU the same memory, to a GPU a copy that the host does not wait for."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
