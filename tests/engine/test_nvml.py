"""Metrics of GPUs are there where a GPU is, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from services.common import metric_names as names
from services.common.metrics import Metrics
from services.engine import nvml

GPU_METRICS = (
    names.GPU_UTILIZATION,
    names.GPU_MEMORY,
    names.GPU_MEMORY_LIMIT,
    names.GPU_CLOCK,
    names.GPU_POWER,
    names.GPU_THROTTLED,
)


class Refused(Exception):
    """NVML's own error."""


def _driver(**changes: Any) -> SimpleNamespace:
    """Answers as NVML's module does, for a card that is called by its number."""
    reasons = {"SwPowerCap": 4, "HwSlowdown": 8, "SwThermalSlowdown": 32, "HwThermalSlowdown": 64}
    answers: dict[str, Any] = {
        "NVMLError": Refused,
        "NVML_CLOCK_SM": 1,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid.removeprefix("GPU-")),
        "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=50 + handle),
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(used=1000 + handle, total=4000),
        "nvmlDeviceGetClockInfo": lambda handle, clock: 1500 * clock,
        "nvmlDeviceGetPowerUsage": lambda handle: 250_000,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 64 | 4,
        "nvmlClocksEventReasonHwPowerBrakeSlowdown": 128,
        **{f"nvmlClocksEventReason{name}": value for name, value in reasons.items()},
    }
    return SimpleNamespace(**{**answers, **changes})


def _values(metrics: Metrics) -> dict[tuple[str, ...], float]:
    metrics.sample()
    found = {}
    for family in metrics._registry.collect():
        for sample in family.samples:
            found[sample.name, *sample.labels.values()] = sample.value
    return found


def _is_there(metrics: Metrics) -> bool:
    shown = {key[0] for key in _values(metrics)}
    return any(name in shown for metric in GPU_METRICS for name in metric.series)


def test_each_gpu_is_read() -> None:
    """Two cards by the UUIDs that torch gives, in the units that the names say."""
    metrics = Metrics()
    nvml.watch(metrics, ["3", "7"], _driver)
    values = _values(metrics)
    assert values[names.GPU_UTILIZATION.series[0], "0"] == pytest.approx(0.53)
    assert values[names.GPU_MEMORY.series[0], "1"] == 1007
    assert values[names.GPU_MEMORY_LIMIT.series[0], "1"] == 4000
    assert values[names.GPU_CLOCK.series[0], "0"] == 1.5e9
    assert values[names.GPU_POWER.series[0], "0"] == 250
    throttled = {cause: values[names.GPU_THROTTLED.series[0], "0", cause] for cause in nvml.THROTTLES}
    assert throttled == {"power": 1, "heat": 1, "hardware": 0}


def test_what_a_card_does_not_tell_is_left_out() -> None:
    """The rest is read all the same."""

    def refuse(_handle: int) -> None:
        raise Refused("not supported")

    metrics = Metrics()
    nvml.watch(metrics, ["3"], lambda: _driver(nvmlDeviceGetPowerUsage=refuse))
    values = _values(metrics)
    assert (names.GPU_POWER.series[0], "0") not in values
    assert (names.GPU_CLOCK.series[0], "0") in values


def test_without_a_gpu_or_a_driver_there_is_no_metric() -> None:
    """No GPU: nothing is even loaded; a driver that does not answer is one warning."""
    metrics = Metrics()

    def never() -> None:
        raise AssertionError("loaded")

    nvml.watch(metrics, [], never)
    assert not _is_there(metrics)

    def broken() -> None:
        raise Refused("library not found")

    nvml.watch(metrics, ["3"], lambda: _driver(nvmlInit=broken))
    assert not _is_there(metrics)
