"""The front door's policy: whether strangers are let in, and how tenants' prefix caches are kept apart. No gRPC."""

from __future__ import annotations

import hashlib
import ipaddress

from services.common.logs import Log
from services.common.metrics import Metrics
from services.common.registry import Registry
from services.common.serve import ServerSettings, StartError
from services.gateway.identity import ANONYMOUS_TENANT, Access
from services.gateway.keys import KeyFile, KeyRing, RedisKeys
from services.gateway.meter import Meter
from services.gateway.quota import MemoryQuotas, UsageFile
from services.gateway.redis_quota import RedisQuotas
from services.gateway.settings import AccessSettings, PeerSettings, QuotaSettings

SALT_BYTES = 16
EVERYBODY = "*"


def decide_access(settings: AccessSettings, server: ServerSettings) -> Access:
    """Who is let in. Raises StartError rather than open a door to the network that nobody asked to open."""
    anonymous = settings.anonymous == "yes"
    if settings.anonymous == "auto" and not settings.keyed:
        if not is_loopback(server.host):
            raise StartError(
                f"HEADRACE_GATEWAY_HOST={server.host} can be reached from elsewhere, and there are no keys: set "
                "HEADRACE_GATEWAY_KEYS_FILE, or HEADRACE_GATEWAY_ANONYMOUS=yes to let everybody in"
            )
        anonymous = True
    return Access(anonymous=anonymous, keyed=settings.keyed)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def key_ring(settings: AccessSettings, redis_url: str, access: Access, log: Log) -> KeyRing | None:
    """What keeps the keys up to date; None without keys. Raises StartError."""
    if settings.keys_file is not None:
        return KeyRing(KeyFile(settings.keys_file), access, log)
    if settings.keys_in_redis:
        if not redis_url:
            raise StartError("HEADRACE_GATEWAY_KEYS_IN_REDIS=true needs HEADRACE_REDIS_URL")
        return KeyRing(RedisKeys(redis_url), access, log)
    return None


def find_registry(settings: PeerSettings, redis_url: str) -> Registry | None:
    """Where engines register; None: those named are all there are. Raises StartError."""
    if not settings.engines_in_redis:
        return None
    if not redis_url:
        raise StartError("HEADRACE_GATEWAY_ENGINES_IN_REDIS=true needs HEADRACE_REDIS_URL")
    return Registry(redis_url)


def make_meter(settings: QuotaSettings, redis_url: str, metrics: Metrics, log: Log) -> Meter:
    """What keeps quotas and usage. Raises StartError."""
    if redis_url and settings.usage_file is not None:
        raise StartError("HEADRACE_GATEWAY_USAGE_FILE is set beside HEADRACE_REDIS_URL, which holds the usage log")
    try:
        usage_log = UsageFile(settings.usage_file) if settings.usage_file is not None else None
    except OSError as error:
        raise StartError(f"HEADRACE_GATEWAY_USAGE_FILE={settings.usage_file}: {error.strerror}") from error
    shared = RedisQuotas(redis_url, settings.lease_s) if redis_url else None
    return Meter(
        shared,
        MemoryQuotas(usage_log),
        settings.fallback_share,
        metrics,
        log,
        decision_s=settings.decision_ms / 1000,
        renew_s=settings.lease_s / 3,
    )


class Salts:
    """What engines know tenants by: keyed hashes, so that nobody can choose another tenant's."""

    def __init__(self, settings: AccessSettings) -> None:
        self._key = hashlib.sha256(settings.cache_salt_key.encode()).digest()
        self._shared = frozenset(settings.shared_prefixes)
        self._made: dict[str, bytes] = {}

    def of(self, tenant: str) -> bytes:
        """The salt of a tenant's prefix cache; empty for anonymous callers, one for all that are declared to share."""
        if EVERYBODY in self._shared or tenant in self._shared:
            tenant = EVERYBODY
        elif tenant == ANONYMOUS_TENANT:
            return b""
        return self.fair_key(tenant)

    def fair_key(self, tenant: str) -> bytes:
        """What engines know a tenant by, shared prefixes or not."""
        if tenant not in self._made:
            self._made[tenant] = hashlib.blake2b(tenant.encode(), key=self._key, digest_size=SALT_BYTES).digest()
        return self._made[tenant]
