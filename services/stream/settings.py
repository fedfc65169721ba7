"""Settings of the stream process."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.logs import LogSettings
from services.common.models import ModelSettings
from services.common.serve import ServerSettings
from services.common.settings import setting
from services.common.shared import RedisSettings
from services.common.telemetry import TelemetrySettings
from services.common.tls import PeerTlsSettings, TlsSettings


@dataclass(frozen=True)
class CoalescingSettings:
    """How many tokens travel in one message."""

    SECTION = "STREAM"
    coalesce_tokens: int = setting(4, "tokens that fill a message", minimum=1, maximum=64)
    coalesce_ms: float = setting(40.0, "milliseconds after which a message leaves unfilled", minimum=0, maximum=10_000)


@dataclass(frozen=True)
class ResumeSettings:
    """How long a resumable stream waits for its reader and for an engine."""

    SECTION = "STREAM"
    detached_s: float = setting(30.0, "seconds that a generation goes on without a reader", minimum=0, maximum=86_400)
    replay_s: float = setting(300.0, "seconds that messages are kept after the last one", minimum=1, maximum=86_400)
    engine_retry_s: float = setting(30.0, "seconds to look for an engine when one is lost", minimum=0, maximum=3600)


@dataclass(frozen=True)
class StreamSettings:
    """Everything that the stream process can be told."""

    server: ServerSettings = ServerSettings(port=50052)
    tls: TlsSettings = TlsSettings()
    peer_tls: PeerTlsSettings = PeerTlsSettings()
    coalescing: CoalescingSettings = CoalescingSettings()
    resume: ResumeSettings = ResumeSettings()
    redis: RedisSettings = RedisSettings()
    model: ModelSettings = ModelSettings()
    trace: TelemetrySettings = TelemetrySettings()
    log: LogSettings = LogSettings()
