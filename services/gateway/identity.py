"""Who calls: API keys and client certificates become an identity. Knows no gRPC and no clock.

A key is kept as its SHA-256 alone; keys are random and long, so nothing slower is needed. Callers without a key, with a
wrong one and with a revoked one take the same road and get the same answer.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from headrace.errors import PermissionDenied, Unauthenticated, Unavailable
from headrace.v1.generation_pb2 import PRIORITY_INTERACTIVE, PRIORITY_STANDARD, Priority

AUTHORIZATION = "authorization"
SCHEME = "bearer "
CERTIFICATE = "certificate:"
REFUSAL = "no identity: the API key or client certificate is missing or not known here"
ANONYMOUS_TENANT = "-"  # the tenant where there is no identity
_PRIORITIES = {name.removeprefix("PRIORITY_").lower(): number for name, number in Priority.items() if number}


@dataclass(frozen=True, slots=True)
class Limits:
    """What one key may use; 0: no limit."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0  # prompt and completion
    concurrent_requests: int = 0
    tokens_per_day: int = 0  # by UTC

    def __bool__(self) -> bool:
        return any(self.values())

    def scaled(self, share: float) -> Limits:
        """The same limits for a gateway that decides alone: `share` of each, at least 1."""
        return Limits(*(max(1, int(value * share)) if value else 0 for value in self.values()))

    def values(self) -> tuple[int, ...]:
        """In the order of the fields."""
        return (self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests, self.tokens_per_day)


@dataclass(frozen=True, slots=True)
class Identity:
    """A caller.

    Attributes:
        tenant: whose work it is: for fairness, prefix caches, metrics and bills.
        key_id: names the key or certificate; its limits are counted under it. "": anonymous.
        models: that it may ask; empty: all.
        ceiling: the most urgent priority that it may ask for.
        limits: what it may use.
        weight: its tenant's share of a crowded gateway, beside others'.
        digest: SHA-256 of the key.
    """

    tenant: str = ANONYMOUS_TENANT
    key_id: str = ""
    models: frozenset[str] = frozenset()
    ceiling: int = PRIORITY_INTERACTIVE
    limits: Limits = Limits()
    weight: float = 1.0
    digest: str = field(default="", repr=False)

    def check_model(self, model: str) -> None:
        """Raises PermissionDenied for a model, by name, that the caller may not ask."""
        if self.models and model not in self.models:
            allowed = ", ".join(sorted(self.models))
            raise PermissionDenied(
                f"generation.model is {model!r}; this key may ask: {allowed}", field="generation.model"
            )

    def priority(self, asked: int) -> Priority:
        """The priority that a request gets; 0 asks for the usual one. Raises PermissionDenied above the ceiling."""
        if not asked:
            return cast("Priority", max(PRIORITY_STANDARD, self.ceiling))
        if asked < self.ceiling:
            name = Priority.Name(asked) if asked in Priority.values() else str(asked)
            raise PermissionDenied(
                f"generation.priority is {name}; this key may ask for {Priority.Name(self.ceiling)} and below",
                field="generation.priority",
            )
        return cast("Priority", asked)


ANONYMOUS = Identity()
_NOBODY = "0" * 64
KEY_ID_DIGITS = 12
Table = Mapping[str, Identity]  # by key id: the first digits of the SHA-256 of a key, or of "certificate:" and a name


class BadKeys(ValueError):
    """A table of keys is wrong; the message names the entry and the field, never a hash."""


class Access:
    """Decides who a caller is. `table` is replaced as a whole when keys change; None: not read yet.

    Args:
        anonymous: whether a caller without any credentials is taken.
        keyed: whether there are keys at all.
    """

    def __init__(self, *, anonymous: bool, keyed: bool) -> None:
        self._anonymous, self._keyed = anonymous, keyed
        self.table: Table | None = None if keyed else {}

    def identify(self, metadata: Mapping[str, str], certificate_names: Iterable[str] = ()) -> Identity:
        """Who the caller is.

        Raises:
            Unauthenticated: nobody that is known; one answer for every kind of it.
            Unavailable: the keys have not been read yet.
        """
        given = metadata.get(AUTHORIZATION)
        if not self._keyed:
            if self._anonymous:
                return ANONYMOUS
            raise Unauthenticated(REFUSAL)
        if self.table is None:
            raise Unavailable("the keys cannot be read now", retry_after_s=1.0)
        names = [f"{CERTIFICATE}{name}" for name in certificate_names]
        if given is None and not names and self._anonymous:
            return ANONYMOUS
        key = given[len(SCHEME) :].strip() if given and given.lower().startswith(SCHEME) else ""
        if key.startswith(CERTIFICATE):  # a name is no secret
            key = ""
        for text in (key,) if given is not None or not names else names:
            identity = self._find(text)
            if identity is not None:
                return identity
        raise Unauthenticated(REFUSAL)

    def _find(self, text: str) -> Identity | None:
        """The identity behind a text. Found by a part of its hash, compared in constant time, known or not."""
        digest = digest_of(text)
        entry = (self.table or {}).get(digest[:KEY_ID_DIGITS], ANONYMOUS)
        return entry if hmac.compare_digest(digest, entry.digest or _NOBODY) else None


def digest_of(text: str) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_entry(entry: Mapping[str, Any], where: str) -> Identity:
    """One entry of a table of keys. Raises BadKeys."""
    known = {"sha256", "certificate", "tenant", "models", "priority", "weight", *(f.name for f in fields(Limits))}
    unknown = sorted(set(entry) - known)
    if unknown:
        raise BadKeys(f"{where}: {unknown[0]} is no field of a key; expected one of {', '.join(sorted(known))}")
    digest = str(entry.get("sha256", "")).lower()
    if "certificate" in entry:
        digest = digest_of(f"{CERTIFICATE}{entry['certificate']}")
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise BadKeys(f"{where}: sha256 has {len(digest)} characters; expected 64 hexadecimal digits, or certificate")
    tenant = entry.get("tenant")
    if not isinstance(tenant, str) or tenant in ("", ANONYMOUS_TENANT, "*") or len(tenant) > 64:
        raise BadKeys(f"{where}: tenant is {tenant!r}; expected 1 to 64 characters, neither - nor *")
    priority = entry.get("priority", "interactive")
    if priority not in _PRIORITIES:
        raise BadKeys(f"{where}: priority is {priority!r}; expected one of {', '.join(_PRIORITIES)}")
    models = entry.get("models", [])
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise BadKeys(f"{where}: models is {models!r}; expected a list of names")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0.01 <= weight <= 100:
        raise BadKeys(f"{where}: weight is {weight!r}; expected a number from 0.01 to 100")
    counts = {f.name: entry.get(f.name, 0) for f in fields(Limits)}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
            raise BadKeys(f"{where}: {name} is {value!r}; expected a whole number, 0 for no limit")
    key_id, ceiling = digest[:KEY_ID_DIGITS], _PRIORITIES[priority]
    return Identity(tenant, key_id, frozenset(models), ceiling, Limits(**counts), float(weight), digest)
