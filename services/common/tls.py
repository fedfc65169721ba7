"""TLS of a server, with certificates that are read again as they change. Knows no service."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from services.common.settings import setting


@dataclass(frozen=True)
class TlsSettings:
    """Whether and how connections are encrypted."""

    tls_certificate: Path | None = setting(None, "certificate chain, PEM; unset: no TLS. Read again when it changes")
    tls_key: Path | None = setting(None, "private key of the certificate, PEM")
    tls_client_ca: Path | None = setting(None, "authorities of client certificates, PEM; set: each client needs one")

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("TLS_CERTIFICATE and TLS_KEY belong together: one of them is not set")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("TLS_CLIENT_CA needs TLS_CERTIFICATE and TLS_KEY")

    def credentials(self) -> grpc.ServerCredentials | None:
        """What a server listens with; None: plain text. Raises OSError, ValueError."""
        if self.tls_certificate is None:
            return None
        files = _Files(self)
        return grpc.dynamic_ssl_server_credentials(
            files.configuration(),
            files.renewed,  # type: ignore[arg-type]  # None means: nothing new
            require_client_authentication=self.tls_client_ca is not None,
        )


class _Files:
    """The files of one server. `renewed` is called by gRPC for each handshake, on a thread of its own."""

    def __init__(self, settings: TlsSettings) -> None:
        chosen = (settings.tls_key, settings.tls_certificate, settings.tls_client_ca)
        self._paths = [path for path in chosen if path is not None]
        self._seen = self._stamps()

    def _stamps(self) -> list[tuple[int, int]]:
        return [(stat.st_mtime_ns, stat.st_ino) for stat in (path.stat() for path in self._paths)]

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        key, certificate, *authorities = [path.read_bytes() for path in self._paths]
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities[0] if authorities else None)

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new files, or None: the last ones stay in force, also when they cannot be read now."""
        try:
            stamps = self._stamps()
            if stamps == self._seen:
                return None
            configuration = self.configuration()
        except OSError:
            return None
        self._seen = stamps
        return configuration
