"""Who calls: keys are found by their hash, and every stranger gets the same answer."""

from __future__ import annotations

import hashlib
import json

import pytest
import structlog

from headrace import errors
from headrace.v1 import generation_pb2
from services.common.serve import ServerSettings, StartError
from services.common.shared import SharedStateLost
from services.gateway.front import Salts, decide_access
from services.gateway.identity import ANONYMOUS, Access, BadKeys, Limits, digest_of, read_entry
from services.gateway.keys import KeyFile, KeyRing, RedisKeys
from services.gateway.settings import AccessSettings

KEY = "hr-0123456789abcdef"
LOG = structlog.stdlib.get_logger()


def entry(key: str = KEY, **fields):
    return {"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": "acme", **fields}


def access(*entries, anonymous: bool = False) -> Access:
    made = Access(anonymous=anonymous, keyed=True)
    read = [read_entry(one, "here") for one in entries]
    made.table = {identity.key_id: identity for identity in read}
    return made


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_is_its_identity():
    """Tenant, models, ceiling and limits are those of the entry."""
    made = access(entry(models=["m"], priority="standard", requests_per_minute=3, weight=2))
    identity = made.identify(bearer(KEY))
    assert (identity.tenant, identity.models, identity.weight) == ("acme", {"m"}, 2.0)
    assert identity.limits == Limits(requests_per_minute=3)
    assert made.identify({"authorization": f"bearer  {KEY} "}) == identity


@pytest.mark.parametrize(
    "metadata",
    [{}, bearer(""), bearer("wrong"), bearer(KEY + "x"), {"authorization": KEY}, {"authorization": "Basic eDp5"},
     {"authorization": "Bearer \udcff"}, bearer(digest_of(KEY))],
)  # fmt: skip
def test_every_stranger_gets_the_same_answer(metadata):
    """Missing, wrong, of another scheme, the hash itself: one status, one text."""
    with pytest.raises(errors.Unauthenticated) as caught:
        access(entry()).identify(metadata)
    with pytest.raises(errors.Unauthenticated) as revoked:
        access().identify(bearer(KEY))
    assert str(caught.value) == str(revoked.value)


def test_a_certificate_is_an_identity():
    """By a name in it; a wrong key beside a good certificate is still a wrong key."""
    made = access({"certificate": "billing.acme.example", "tenant": "acme"})
    assert made.identify({}, ["other", "billing.acme.example"]).tenant == "acme"
    for metadata, names in (
        ({}, ["other"]),
        (bearer("x"), ["billing.acme.example"]),
        (bearer("certificate:billing.acme.example"), []),
    ):
        with pytest.raises(errors.Unauthenticated):
            made.identify(metadata, names)


def test_nobody_is_a_tenant_by_accident():
    """Anonymous callers only where they are allowed; before keys are read nobody is let in."""
    assert access(entry(), anonymous=True).identify({}) is ANONYMOUS
    with pytest.raises(errors.Unauthenticated):
        access(entry(), anonymous=True).identify(bearer("wrong"))
    with pytest.raises(errors.Unavailable):
        Access(anonymous=False, keyed=True).identify(bearer(KEY))


def test_what_a_key_may_ask():
    """Models by name, priorities up to the ceiling; a refusal names field and value."""
    identity = read_entry(entry(models=["a"], priority="batch"), "here")
    identity.check_model("a")
    with pytest.raises(errors.PermissionDenied, match=r"'b'.*a") as caught:
        identity.check_model("b")
    assert caught.value.field == "generation.model"
    assert identity.priority(0) == generation_pb2.PRIORITY_BATCH
    with pytest.raises(errors.PermissionDenied, match="INTERACTIVE"):
        identity.priority(generation_pb2.PRIORITY_INTERACTIVE)
    assert ANONYMOUS.priority(0) == generation_pb2.PRIORITY_STANDARD


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"tenant": ""}, "tenant"), ({"tenant": "-"}, "tenant"), ({"priority": "urgent"}, "'urgent'"), ({"rpm": 3}, "rpm"),
     ({"sha256": "12"}, "sha256"), ({"tokens_per_day": -1}, "-1"), ({"requests_per_minute": True}, "True"),
     ({"models": "m"}, "models"), ({"weight": 0}, "weight")],
)  # fmt: skip
def test_a_bad_entry_is_named(fields, said):
    """By its place and field; a hash is never shown."""
    with pytest.raises(BadKeys, match=said) as caught:
        read_entry({**entry(), **fields}, "keys[0]")
    assert digest_of(KEY) not in str(caught.value)


async def test_a_file_is_read_again(tmp_path):
    """A new key works, a revoked one does not; a broken file leaves the last good one in force."""
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [entry()]}))
    made = Access(anonymous=False, keyed=True)
    ring = KeyRing(KeyFile(path), made, LOG)
    await ring.load()
    assert made.identify(bearer(KEY)).tenant == "acme"
    path.write_text("{ broken")
    with pytest.raises(BadKeys):
        await ring.load()
    assert made.identify(bearer(KEY)).tenant == "acme"
    path.write_text(json.dumps({"keys": [entry("another")]}))
    await ring.load()
    with pytest.raises(errors.Unauthenticated):
        made.identify(bearer(KEY))


async def test_keys_in_redis(own_redis_server):
    """The same entries under their hash; without Redis the last ones stay in force."""
    rest = {key: value for key, value in entry(models=["m"]).items() if key != "sha256"}
    own_redis_server.client.hset("headrace:keys", digest_of(KEY), json.dumps(rest))
    made = Access(anonymous=False, keyed=True)
    ring = KeyRing(RedisKeys(own_redis_server.url), made, LOG)
    await ring.load()
    assert made.identify(bearer(KEY)).models == {"m"}
    own_redis_server.stop()
    with pytest.raises(SharedStateLost):
        await ring.load()
    assert made.identify(bearer(KEY)).models == {"m"}
    own_redis_server.start()
    await ring.load()
    with pytest.raises(errors.Unauthenticated):
        made.identify(bearer(KEY))
    await ring.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gateway"])  # noqa: S104
def test_the_door_to_the_network_is_opened_on_purpose(host):
    """Without keys a gateway serves this machine alone, unless told otherwise."""
    with pytest.raises(StartError, match="HEADRACE_GATEWAY_ANONYMOUS"):
        decide_access(AccessSettings(), ServerSettings(host=host))
    assert decide_access(AccessSettings(anonymous="yes"), ServerSettings(host=host)).identify({}) is ANONYMOUS
    for here in ("127.0.0.1", "127.0.0.3", "localhost", "[::1]"):
        assert decide_access(AccessSettings(), ServerSettings(host=here)).identify({}) is ANONYMOUS


def test_salts_keep_tenants_apart():
    """One salt a tenant, not to be guessed without the key; tenants that are declared to share have the same."""
    salts = Salts(AccessSettings(cache_salt_key="k", shared_prefixes=("a", "b")))
    assert salts.of("a") == salts.of("b") not in {salts.of("c"), b""}
    assert salts.of("c") == salts.of("c") != salts.of("d")
    assert salts.of("c") != Salts(AccessSettings(cache_salt_key="other")).of("c")
    assert salts.of("-") == b""


def test_no_secret_is_shown():
    """A hash does not appear where an identity is described."""
    assert digest_of(KEY) not in repr(read_entry(entry(), "here"))
