"""TLS settings: what a process shows, whom it trusts, and what it says of files that it cannot use."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
from redis.asyncio.connection import parse_url

from services.common import dial, tls
from services.common.settings import SettingsError
from services.common.tls import PeerTlsSettings, TlsSettings
from tests import certificates
from tests.deploy.test_healthcheck import process


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificates.make(tmp_path_factory.mktemp("tls") / "valid")


@pytest.fixture(scope="module")
def expired(made: Path) -> Path:
    """Certificates of the same authority that have run out."""
    directory = made.parent / "expired"
    directory.mkdir()
    for name in ("ca.key", "ca.crt"):
        (directory / name).write_bytes((made / name).read_bytes())
    return certificates.make(directory, days=-1)


def server_tls(directory: Path, name: str) -> TlsSettings:
    return TlsSettings(directory / f"{name}.crt", directory / f"{name}.key", directory / "ca.crt")


def peer_tls(directory: Path, name: str) -> PeerTlsSettings:
    return PeerTlsSettings(directory / "ca.crt", directory / f"{name}.crt", directory / f"{name}.key")


def test_every_bad_file_is_named_by_its_variable(made: Path, expired: Path) -> None:
    """Server's and caller's files are looked at together; variable, path and reason are in one line each."""
    with pytest.raises(SettingsError) as caught:
        tls.check("engine", server_tls(made.parent / "none", "engine"), peer_tls(expired, "engine"))
    ours, peers = caught.value.problems
    missing = made.parent / "none" / "engine.crt"
    assert ours == f"HEADRACE_ENGINE_TLS_CERTIFICATE={missing}: cannot be read (No such file or directory)"
    assert peers.startswith(f"HEADRACE_PEERS_TLS_CERTIFICATE={expired / 'engine.crt'}: expired at ")
    tls.check("engine", server_tls(made, "engine"), peer_tls(made, "engine"))
    tls.check("engine", TlsSettings(), PeerTlsSettings())


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TlsSettings(tls_certificate=Path("x")), "belong together"),
        (lambda: TlsSettings(tls_client_ca=Path("x")), "TLS_CLIENT_CA needs"),
        (lambda: PeerTlsSettings(Path("x"), tls_key=Path("x")), "belong together"),
        (lambda: PeerTlsSettings(None, Path("x"), Path("x")), "needs HEADRACE_PEERS_TLS_CA"),
    ],
)
def test_halves_are_refused(make, said: str) -> None:
    """A certificate without its key, or one that would never be shown."""
    with pytest.raises(ValueError, match=said):
        make()


def test_redis_is_called_as_peers_are(made: Path) -> None:
    """With an authority the URL asks for TLS by the same files; what it says of its own stays; sockets need none."""
    settings = peer_tls(made, "stream")
    parts = parse_url(settings.redis_url("redis://:p%40ss@redis:6379/1"))
    assert (parts["host"], parts["port"], parts["db"], parts["password"]) == ("redis", 6379, 1, "p@ss")
    assert parts["connection_class"].__name__ == "SSLConnection"
    assert parts["ssl_ca_certs"] == str(made / "ca.crt")
    assert parts["ssl_certfile"] == str(made / "stream.crt")
    assert parts["ssl_keyfile"] == str(made / "stream.key")
    own = parse_url(settings.redis_url("rediss://redis/0?ssl_ca_certs=/own"))
    assert own["ssl_ca_certs"] == "/own"
    assert own["ssl_keyfile"] == str(made / "stream.key")
    assert settings.redis_url("unix:///run/redis.sock") == "unix:///run/redis.sock"
    assert settings.redis_url("") == ""
    assert PeerTlsSettings().redis_url("redis://redis/0") == "redis://redis/0"


async def test_who_waits_says_what_is_wrong(made: Path, expired: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer whose certificate has run out, who wants one, another's: the log of who waits has the reason."""
    monkeypatch.setattr(dial, "LOG_INTERVAL_S", 0.05)
    cases = [
        (certificates.server(expired, "stream"), peer_tls(made, "gateway"), "certificate has expired"),
        (certificates.server(made, "stream"), PeerTlsSettings(), "Socket closed"),
        (
            certificates.server(made.parent / "other", "stream"),
            peer_tls(made, "gateway"),
            "unable to get local issuer certificate",
        ),
    ]
    for credentials, calling, said in cases:
        with process("SERVING", credentials) as address:
            where = address.replace("127.0.0.1", "localhost")
            assert said in await reason_of(where, calling), said


@pytest.fixture(scope="module", autouse=True)
def other(made: Path) -> None:
    """Another authority's certificates."""
    certificates.make(made.parent / "other")


async def reason_of(address: str, calling: PeerTlsSettings) -> str:
    """What is logged while a process waits for the one at the address."""

    class Waited(Exception):
        pass

    class Log:
        def info(self, event: str, **fields: str) -> None:
            assert (event, fields["peer"]) == ("waiting", "stream")
            raise Waited(fields["reason"])

    async with dial.open_channel(address, calling.credentials()) as channel:
        with pytest.raises(Waited) as caught:
            await dial.wait_until_serving(channel, "stream", address, Log())
    assert address in str(caught.value)
    return str(caught.value)


def test_new_files_that_cannot_be_used(made: Path, tmp_path: Path) -> None:
    """The old ones stay in force, one line says why, and good ones are taken up again."""
    for name in ("stream.crt", "stream.key", "ca.crt"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    with structlog.testing.capture_logs() as lines:
        files = tls._Files(server_tls(tmp_path, "stream"), structlog.get_logger())
        assert files.renewed() is None
        (tmp_path / "stream.crt").write_bytes((made / "engine.crt").read_bytes())
        assert files.renewed() is None
        assert files.renewed() is None
        (tmp_path / "stream.key").write_bytes((made / "engine.key").read_bytes())
        assert files.renewed() is not None
    assert [line["reason"] for line in lines] == [
        f"{tmp_path / 'stream.key'}: is not the key of {tmp_path / 'stream.crt'}"
    ]
