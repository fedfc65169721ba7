"""Who may call, over real connections: keys, certificates, tenants."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess

import grpc
import pytest

from headrace import errors
from tests.pipeline.conftest import until
from tests.pipeline.gateways import serves, start_gateway

OPENSSL = shutil.which("openssl") or "openssl"
LONG = "a prefix that is long enough to fill several blocks of the cache, word after word after word " * 3


def write_keys(path, **tenants: str) -> None:
    """A file with a key for each tenant."""
    entries = [{"sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": name} for name, key in tenants.items()]
    path.write_text(json.dumps({"keys": entries}))


def headers(key: str) -> dict[str, str]:
    return {"headers": {"authorization": f"Bearer {key}"}}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    write_keys(path, acme="key-a", bolt="key-b")
    return path


@pytest.fixture(scope="module")
def keyed(tiny_pipeline, keys_file):
    with start_gateway(tiny_pipeline, GATEWAY_KEYS_FILE=str(keys_file)) as gateway:
        yield gateway


def test_only_known_callers_get_in(keyed):
    """One answer for every stranger, on every call; health answers anybody."""
    said = set()
    for given in ({}, headers("wrong"), headers("key-a x"), {"headers": {"authorization": "key-a"}}):
        with keyed.client(**given) as client:
            for ask in (lambda c: c.generate("x", max_tokens=1), lambda c: c.stream("x", max_tokens=1).read_all(),
                        lambda c: c.stream("x", max_tokens=1, window=4).read_all(), lambda c: c.tokenize("x"),
                        lambda c: c.detokenize([5]), lambda c: c.list_models(), lambda c: c.get_stats()):  # fmt: skip
                with pytest.raises(errors.Unauthenticated) as caught:
                    ask(client)
                said.add(caught.value.message)
    assert len(said) == 1
    assert serves(keyed.address)()
    with keyed.client(**headers("key-a")) as client:
        assert client.generate("x", max_tokens=2, ignore_eos=True).usage.completion_token_count == 2
        assert client.list_models()


def test_tenants_do_not_share_prefixes(keyed):
    """The second request of a tenant finds the first one's prefix; another tenant's does not."""
    cached = []
    for key in ("key-a", "key-a", "key-b"):
        with keyed.client(**headers(key)) as client:
            cached.append(client.generate(LONG, max_tokens=1).usage.cached_token_count)
    assert (cached[0], cached[2]) == (0, 0)
    assert cached[1] > 0


def test_another_tenants_stream_cannot_be_resumed(keyed):
    """It is not found, as if it had never been."""
    with keyed.client(**headers("key-a")) as client, keyed.client(**headers("key-b")) as other:
        stream = client.stream("Once", max_tokens=20, ignore_eos=True, resumable=True)
        deltas = iter(stream)
        next(deltas)
        with pytest.raises(errors.NotFound):
            other.resume(stream.stream_id, resume_timeout=0).read_all()
        assert list(deltas)
        assert stream.answer.usage.completion_token_count == 20


def test_keys_change_while_it_serves(keyed, keys_file):
    """A new key works and a revoked one does not, without a restart."""

    def known(key: str) -> bool:
        with keyed.client(**headers(key)) as client:
            try:
                return bool(client.list_models())
            except errors.Unauthenticated:
                return False

    write_keys(keys_file, bolt="key-b", third="key-c")
    until(lambda: known("key-c") and not known("key-a"), 10, "keys are read again")
    write_keys(keys_file, acme="key-a", bolt="key-b")
    until(lambda: known("key-a"), 10, "keys are read again")


def openssl(*arguments: str) -> None:
    subprocess.run([OPENSSL, *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, two server certificates and a client's."""
    directory = tmp_path_factory.mktemp("tls")
    ca = (str(directory / "ca.key"), str(directory / "ca.pem"))
    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    openssl(*new, "-x509", "-keyout", ca[0], "-out", ca[1], "-subj", "/CN=test authority")
    for name, subject in (("server", "localhost"), ("renewed", "localhost"), ("client", "billing.acme.example")):
        openssl(
            *new, "-x509", "-CA", ca[1], "-CAkey", ca[0], "-keyout", str(directory / f"{name}.key"), "-out",
            str(directory / f"{name}.pem"), "-subj", f"/CN={subject}", "-addext", f"subjectAltName=DNS:{subject}",
        )  # fmt: skip
    return directory


def test_certificates_are_identities_and_are_renewed(tiny_pipeline, certificates, tmp_path):
    """A client's certificate is its identity; without one there is no connection; a renewed certificate is taken up."""
    for kind in ("key", "pem"):
        (tmp_path / f"live.{kind}").write_bytes((certificates / f"server.{kind}").read_bytes())
    keys = tmp_path / "keys.toml"
    keys.write_text('[[keys]]\ncertificate = "billing.acme.example"\ntenant = "acme"\n')
    authority, key, chain = [(certificates / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem")]
    credentials = grpc.ssl_channel_credentials(authority, key, chain)
    settings = {
        "GATEWAY_TLS_CERTIFICATE": str(tmp_path / "live.pem"),
        "GATEWAY_TLS_KEY": str(tmp_path / "live.key"),
        "GATEWAY_TLS_CLIENT_CA": str(certificates / "ca.pem"),
        "GATEWAY_KEYS_FILE": str(keys),
    }
    with start_gateway(tiny_pipeline, credentials, **settings) as gateway:
        with gateway.client() as client:
            assert client.generate("x", max_tokens=1).usage.completion_token_count == 1
        assert not serves(gateway.address, grpc.ssl_channel_credentials(authority))()
        assert not serves(gateway.address)()
        before = shown(gateway.address, certificates)
        for kind in ("key", "pem"):
            fresh = tmp_path / f"fresh.{kind}"
            fresh.write_bytes((certificates / f"renewed.{kind}").read_bytes())
            fresh.replace(tmp_path / f"live.{kind}")
        until(lambda: shown(gateway.address, certificates) not in ("", before), 10, "the certificate is renewed")


def shown(address: str, certificates) -> str:
    """Serial number of the certificate that a server shows."""
    chain = subprocess.run(
        [OPENSSL, "s_client", "-connect", address, "-alpn", "h2", "-cert", certificates / "client.pem", "-key",
         certificates / "client.key"], input=b"", capture_output=True, check=False,
    ).stdout  # fmt: skip
    read = subprocess.run([OPENSSL, "x509", "-noout", "-serial"], input=chain, capture_output=True, check=False)
    return read.stdout.decode()


def test_a_stranger_costs_nothing(keyed, tiny_pipeline):
    """A refused call reaches no other process."""
    before = tiny_pipeline.baseline()
    with keyed.client() as client, pytest.raises(errors.Unauthenticated):
        client.generate(LONG)
    assert tiny_pipeline.baseline() == before
