"""Files of certificates and keys, and what is wrong with them, said before a handshake fails. Knows no service."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime
from pathlib import Path

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_GENERALIZED_TIME = 0x18  # with a year of four digits; a UTCTime's two are those of 1950 to 2049
_VERSION = 0xA0


class CertificateError(ValueError):
    """A file that cannot be used; the message has its path and the reason."""

    def __init__(self, path: Path, trouble: str) -> None:
        super().__init__(f"{path}: {trouble}")
        self.path = path


def read_chain(certificate: Path, key: Path) -> tuple[bytes, bytes]:
    """A certificate with its chain, and its private key, PEM.

    Raises:
        CertificateError: one cannot be read, is not PEM, is not valid now, or they do not belong together.
    """
    chain, private = _read(certificate), _read(key)
    for first, last in _periods(certificate, chain):
        _check_period(certificate, first, last)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: _refuse(key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise CertificateError(key, f"is not the key of {certificate}") from None
        raise CertificateError(key, "holds no private key in PEM") from None
    return chain, private


def read_authorities(path: Path) -> bytes:
    """Certificates of authorities, PEM; some of a bundle may have run out.

    Raises:
        CertificateError: the file cannot be read, holds no certificate, or none that is valid now.
    """
    text = _read(path)
    troubles = []
    for first, last in _periods(path, text):
        try:
            _check_period(path, first, last)
        except CertificateError as error:
            troubles.append(error)
        else:
            return text
    raise troubles[0]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(path, f"cannot be read ({error.strerror})") from None


def _refuse(key: Path) -> str:
    raise CertificateError(key, "is encrypted; expected a key without a password")


def _check_period(path: Path, first: datetime, last: datetime) -> None:
    now = datetime.now(UTC)
    if now > last:
        raise CertificateError(path, f"expired at {last:%Y-%m-%d %H:%M:%S} UTC")
    if now < first:
        raise CertificateError(path, f"is not valid before {first:%Y-%m-%d %H:%M:%S} UTC")


def _periods(path: Path, text: bytes) -> list[tuple[datetime, datetime]]:
    """From when to when each certificate of a file is valid; at least one."""
    try:
        found = [_period(ssl.PEM_cert_to_DER_cert(pem)) for pem in _PEM.findall(text.decode("ascii", "replace"))]
    except (ValueError, IndexError):
        found = []
    if not found:
        raise CertificateError(path, "holds no certificate in PEM")
    return found


def _period(der: bytes) -> tuple[datetime, datetime]:
    """The validity of one certificate (RFC 5280, 4.1). Raises ValueError, IndexError."""
    _, certificate, _ = _element(der, 0)
    _, at, _ = _element(der, certificate)  # what is signed
    tag, _, end = _element(der, at)
    if tag == _VERSION:
        at = end
    for _ in ("serial number", "algorithm", "issuer"):
        _, _, at = _element(der, at)
    _, at, _ = _element(der, at)
    first, at = _time(der, at)
    last, _ = _time(der, at)
    return first, last


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Tag of an element, where its content begins, and where it ends."""
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(der[start : start + size]), start + size
    return tag, start, start + length


def _time(der: bytes, at: int) -> tuple[datetime, int]:
    tag, start, end = _element(der, at)
    text = der[start:end].decode("ascii")
    if tag != _GENERALIZED_TIME:
        text = ("20" if int(text[:2]) < 50 else "19") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC), end
