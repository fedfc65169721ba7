"""Settings of the gateway."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.common.logs import LogSettings
from services.common.serve import ServerSettings
from services.common.settings import setting
from services.common.shared import RedisSettings
from services.common.telemetry import TelemetrySettings
from services.common.tls import PeerTlsSettings, TlsSettings


@dataclass(frozen=True)
class PeerSettings:
    """The processes that the gateway calls."""

    SECTION = "GATEWAY"
    tokenizer_address: str = setting("127.0.0.1:50051", "host:port of the tokenizer")
    stream_address: str = setting("127.0.0.1:50052", "host:port of the stream process")
    engine_addresses: tuple[str, ...] = setting(("127.0.0.1:50053",), "host:port of each engine, comma separated")
    engines_in_redis: bool = setting(False, "engines that registered themselves are found in Redis, beside those named")


@dataclass(frozen=True)
class LimitSettings:
    """What the gateway takes on."""

    SECTION = "GATEWAY"
    max_open_requests: int = setting(256, "requests inside at once; more wait", minimum=1, maximum=100_000)
    max_queued_requests: int = setting(
        128, "requests of each priority that wait for a place; more are refused", minimum=0, maximum=100_000
    )
    knee: int = setting(
        0,
        "requests that an engine keeps its objectives with, by `headrace bench sweep`; 0: all that it runs",
        minimum=0,
    )
    load_share: float = setting(
        0.0, "places inside, as a share of the engines' knees, such as 0.75; 0: max_open_requests", minimum=0.0
    )
    credit_window: int = setting(
        64, "tokens that may be generated beyond what the reader took", minimum=1, maximum=65_536
    )
    slow_reader_s: float = setting(
        60.0, "seconds without progress after which a stream ends", minimum=0.1, maximum=86_400
    )


@dataclass(frozen=True)
class AccessSettings:
    """Who may call."""

    SECTION = "GATEWAY"
    keys_file: Path | None = setting(None, "API keys, TOML or JSON; read again when it changes")
    keys_in_redis: bool = setting(False, "API keys are in Redis, in the hash headrace:keys")
    anonymous: str = setting(
        "auto",
        "callers without credentials; auto: where there are no keys and the address is this machine's own",
        choices=("auto", "yes", "no"),
    )
    cache_salt_key: str = setting("", "what prefix caches' salts are made with; the same in all gateways", secret=True)
    shared_prefixes: tuple[str, ...] = setting((), "tenants that share one prefix cache, comma separated; *: all")

    def __post_init__(self) -> None:
        if self.keys_file is not None and self.keys_in_redis:
            raise ValueError("HEADRACE_GATEWAY_KEYS_FILE and HEADRACE_GATEWAY_KEYS_IN_REDIS are both set; expected one")

    @property
    def keyed(self) -> bool:
        """Whether there are keys at all."""
        return self.keys_file is not None or self.keys_in_redis


@dataclass(frozen=True)
class QuotaSettings:
    """How limits of keys are kept. With Redis they hold over all gateways, and headrace:usage is the usage log."""

    SECTION = "GATEWAY"
    fallback_share: float = setting(
        0.5, "share of each limit that this gateway grants alone while Redis does not answer", minimum=0.0, maximum=1.0
    )
    lease_s: float = setting(
        30.0, "seconds after which the requests of a gateway that died are settled", minimum=1, maximum=3600
    )
    decision_ms: float = setting(
        45.0, "milliseconds that a decision waits for Redis before this gateway decides alone", minimum=1, maximum=5000
    )
    usage_file: Path | None = setting(None, "usage log without Redis: JSON lines, one a request, only appended to")


@dataclass(frozen=True)
class AdminSettings:
    """Where operators call."""

    SECTION = "GATEWAY"
    admin_host: str = setting("127.0.0.1", "address of the admin port")
    admin_port: int = setting(0, "port of AdminService; 0: none", minimum=0, maximum=65535)
    admin_token: str = setting("", "what callers of the admin port show as a bearer token", secret=True)


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
    access: AccessSettings = AccessSettings()
    quotas: QuotaSettings = QuotaSettings()
    tls: TlsSettings = TlsSettings()
    peer_tls: PeerTlsSettings = PeerTlsSettings()
    redis: RedisSettings = RedisSettings()
    admin: AdminSettings = AdminSettings()
    cost: CostSettings = CostSettings()
    trace: TelemetrySettings = TelemetrySettings()
    log: LogSettings = LogSettings()
