"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass

from services.common.logs import LogSettings
from services.common.serve import ServerSettings
from services.common.settings import setting
from services.common.telemetry import TelemetrySettings


@dataclass(frozen=True)
class PeerSettings:
    """The processes that the gateway calls."""

    SECTION = "GATEWAY"
    tokenizer_address: str = setting("127.0.0.1:50051", "host:port of the tokenizer")
    stream_address: str = setting("127.0.0.1:50052", "host:port of the stream process")
    engine_addresses: tuple[str, ...] = setting(("127.0.0.1:50053",), "host:port of each engine, comma separated")


@dataclass(frozen=True)
class LimitSettings:
    """What the gateway takes on."""

    SECTION = "GATEWAY"
    max_open_requests: int = setting(256, "requests inside at once; more are refused", minimum=1, maximum=100_000)
    credit_window: int = setting(
        64, "tokens that may be generated beyond what the reader took", minimum=1, maximum=65_536
    )
    slow_reader_s: float = setting(
        60.0, "seconds without progress after which a stream ends", minimum=0.1, maximum=86_400
    )


@dataclass(frozen=True)
class CostSettings:
    """What is known of the cost of serving."""

    SECTION = "GATEWAY"
    price_hourly: float = setting(
        0.0, "what the whole pipeline costs an hour, in any currency; 0: not known", minimum=0.0
    )


@dataclass(frozen=True)
class GatewaySettings:
    """Everything that the gateway can be told."""

    server: ServerSettings = ServerSettings(port=50050)
    peers: PeerSettings = PeerSettings()
    limits: LimitSettings = LimitSettings()
    cost: CostSettings = CostSettings()
    trace: TelemetrySettings = TelemetrySettings()
    log: LogSettings = LogSettings()
