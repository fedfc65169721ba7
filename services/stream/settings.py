"""Settings of the stream process."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.logs import LogSettings
from services.common.models import ModelSettings
from services.common.serve import ServerSettings
from services.common.settings import setting
from services.common.telemetry import TelemetrySettings


@dataclass(frozen=True)
class CoalescingSettings:
    """How many tokens travel in one message."""

    SECTION = "STREAM"
    coalesce_tokens: int = setting(4, "tokens that fill a message", minimum=1, maximum=64)
    coalesce_ms: float = setting(40.0, "milliseconds after which a message leaves unfilled", minimum=0, maximum=10_000)


@dataclass(frozen=True)
class StreamSettings:
    """Everything that the stream process can be told."""

    server: ServerSettings = ServerSettings(port=50052)
    coalescing: CoalescingSettings = CoalescingSettings()
    model: ModelSettings = ModelSettings()
    trace: TelemetrySettings = TelemetrySettings()
    log: LogSettings = LogSettings()
