"""Settings of the tokenizer process."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.logs import LogSettings
from services.common.models import ModelSettings
from services.common.serve import ServerSettings
from services.common.telemetry import TelemetrySettings
from services.common.tls import PeerTlsSettings, TlsSettings


@dataclass(frozen=True)
class TokenizerSettings:
    """Everything that the tokenizer process can be told."""

    server: ServerSettings = ServerSettings(port=50051)
    tls: TlsSettings = TlsSettings()
    peer_tls: PeerTlsSettings = PeerTlsSettings()
    model: ModelSettings = ModelSettings()
    trace: TelemetrySettings = TelemetrySettings()
    log: LogSettings = LogSettings()
