"""TLS of a server and of the calls that a process makes. Knows no service.

A server reads its files again as they change. What a process shows to others, and whom it trusts, is read at its start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

import grpc

from services.common.certificates import CertificateError, read_authorities, read_chain
from services.common.logs import Log
from services.common.settings import SettingsError, setting, variable_name


@dataclass(frozen=True)
class TlsSettings:
    """Whether and how connections are encrypted."""

    tls_certificate: Path | None = setting(None, "certificate chain, PEM; unset: no TLS. Read again when it changes")
    tls_key: Path | None = setting(None, "private key of the certificate, PEM")
    tls_client_ca: Path | None = setting(None, "authorities of client certificates, PEM; set: each client needs one")

    def __post_init__(self) -> None:
        _check_together(self.tls_certificate, self.tls_key)
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("TLS_CLIENT_CA needs TLS_CERTIFICATE and TLS_KEY")

    def credentials(self, log: Log) -> grpc.ServerCredentials | None:
        """What a server listens with; None: plain text.

        Args:
            log: told when files have changed to what cannot be used.

        Raises:
            CertificateError: the files cannot be used.
        """
        files = _Files(self, log)
        configuration = self.configuration()
        if configuration is None:
            return None
        return grpc.dynamic_ssl_server_credentials(
            configuration,
            files.renewed,  # type: ignore[arg-type]  # None means: nothing new
            require_client_authentication=self.tls_client_ca is not None,
        )

    def configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """What the files hold now; None: there are none. Raises CertificateError."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        chain, key = read_chain(self.tls_certificate, self.tls_key)
        authorities = read_authorities(self.tls_client_ca) if self.tls_client_ca is not None else None
        return grpc.ssl_server_certificate_configuration([(key, chain)], authorities)


@dataclass(frozen=True)
class PeerTlsSettings:
    """Whether and how what a process calls is encrypted: its peers, Redis and the collector, all or none."""

    SECTION = "PEERS"
    tls_ca: Path | None = setting(None, "authorities of whom this process calls, PEM; set: each call is encrypted")
    tls_certificate: Path | None = setting(None, "certificate chain that this process shows when it calls, PEM")
    tls_key: Path | None = setting(None, "private key of the certificate, PEM")

    def __post_init__(self) -> None:
        _check_together(self.tls_certificate, self.tls_key)
        if self.tls_certificate is not None and self.tls_ca is None:
            raise ValueError("HEADRACE_PEERS_TLS_CERTIFICATE needs HEADRACE_PEERS_TLS_CA")

    def credentials(self) -> grpc.ChannelCredentials | None:
        """What channels are opened with; None: plain text. Raises CertificateError."""
        if self.tls_ca is None:
            return None
        authorities = read_authorities(self.tls_ca)
        chain, key = None, None
        if self.tls_certificate is not None and self.tls_key is not None:
            chain, key = read_chain(self.tls_certificate, self.tls_key)
        return grpc.ssl_channel_credentials(authorities, key, chain)

    def redis_url(self, url: str) -> str:
        """A Redis URL with these files, where they are set; what the URL says of its own comes first."""
        if self.tls_ca is None or not url or url.startswith("unix:"):
            return url
        files = {"ssl_ca_certs": self.tls_ca, "ssl_certfile": self.tls_certificate, "ssl_keyfile": self.tls_key}
        said = urlencode({name: str(path) for name, path in files.items() if path is not None and name not in url})
        return url.replace("redis://", "rediss://", 1) + (("&" if "?" in url else "?") + said if said else "")


def check(section: str, tls: TlsSettings, peer_tls: PeerTlsSettings) -> None:
    """Reads every file once. Raises SettingsError, naming the variables at fault."""
    problems = []
    readers: tuple[tuple[str, TlsSettings | PeerTlsSettings, Callable[[], object]], ...] = (
        (section, tls, tls.configuration),
        (PeerTlsSettings.SECTION, peer_tls, peer_tls.credentials),
    )
    for where, settings, read in readers:
        try:
            read()
        except CertificateError as error:
            field = next(name for name, path in vars(settings).items() if path == error.path)
            problems.append(f"{variable_name(where, field)}={error}")
    if problems:
        raise SettingsError(problems)


def _check_together(certificate: Path | None, key: Path | None) -> None:
    if (certificate is None) != (key is None):
        raise ValueError("TLS_CERTIFICATE and TLS_KEY belong together: one of them is not set")


class _Files:
    """The files of one server. `renewed` is called by gRPC for each handshake, on a thread of its own."""

    def __init__(self, settings: TlsSettings, log: Log) -> None:
        chosen = (settings.tls_key, settings.tls_certificate, settings.tls_client_ca)
        self._paths = [path for path in chosen if path is not None]
        self._settings, self._log = settings, log
        self._seen = self._stamps()

    def _stamps(self) -> list[tuple[int, int] | None]:
        return [_stamp(path) for path in self._paths]

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new files, or None: the last ones stay in force, also when the new ones cannot be used."""
        stamps = self._stamps()
        if stamps == self._seen:
            return None
        self._seen = stamps  # each change is read, and complained of, once
        try:
            return self._settings.configuration()
        except CertificateError as error:
            self._log.warning("certificates not read; the last ones stay in force", reason=str(error))
            return None


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino
