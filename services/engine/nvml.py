"""What the driver says of the engine's GPUs, once a second: NVML, through the package `nvidia-ml-py`.

Without a GPU, the package or the driver's library nothing is measured, and no metric of it is there.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from services.common import metric_names as names
from services.common.metrics import Metrics

_log = logging.getLogger("headrace.engine.nvml")
_MEGAHERTZ = 1e6
_MILLIWATTS = 1e3
THROTTLES = {
    "power": ("SwPowerCap", "HwPowerBrakeSlowdown"),
    "heat": ("SwThermalSlowdown", "HwThermalSlowdown"),
    "hardware": ("HwSlowdown",),
}
"""Why clocks are held down, and NVML's reasons for each."""


def watch(metrics: Metrics, uuids: Sequence[str], load: Callable[[], Any] | None = None) -> None:
    """Have these GPUs looked at once a second.

    Args:
        metrics: where values go, with the place in ``uuids`` as label.
        uuids: as torch spells them, without "GPU-"; empty: nothing is done.
        load: gives NVML's Python module; None: imports it.
    """
    if not uuids:
        return
    try:
        library = load() if load is not None else importlib.import_module("pynvml")
        library.nvmlInit()
        handles = [library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}") for uuid in uuids]
    except Exception as error:  # noqa: BLE001 - a missing library, driver or right: served all the same
        _log.warning("no metrics of the GPU: %s", error)
        return
    metrics.each_second(lambda: _sample(metrics, library, handles))


def _sample(metrics: Metrics, library: Any, handles: list[Any]) -> None:
    for place, handle in enumerate(handles):
        gpu = str(place)
        with suppress(library.NVMLError):  # of each, cards that do not tell
            metrics.set(names.GPU_UTILIZATION, library.nvmlDeviceGetUtilizationRates(handle).gpu / 100, gpu)
        with suppress(library.NVMLError):
            memory = library.nvmlDeviceGetMemoryInfo(handle)
            metrics.set(names.GPU_MEMORY, memory.used, gpu)
            metrics.set(names.GPU_MEMORY_LIMIT, memory.total, gpu)
        with suppress(library.NVMLError):
            clock = library.nvmlDeviceGetClockInfo(handle, library.NVML_CLOCK_SM)
            metrics.set(names.GPU_CLOCK, clock * _MEGAHERTZ, gpu)
        with suppress(library.NVMLError):
            metrics.set(names.GPU_POWER, library.nvmlDeviceGetPowerUsage(handle) / _MILLIWATTS, gpu)
        with suppress(library.NVMLError):
            reasons = library.nvmlDeviceGetCurrentClocksEventReasons(handle)
            for cause, members in THROTTLES.items():
                mask = sum(getattr(library, f"nvmlClocksEventReason{member}") for member in members)
                metrics.set(names.GPU_THROTTLED, float(bool(reasons & mask)), gpu, cause)
