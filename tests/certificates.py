"""Certificates for tests, made by the script that operators use."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import grpc

OPENSSL = shutil.which("openssl") or "openssl"
SCRIPT = Path(__file__).parents[1] / "deploy" / "certificates.sh"


def make(directory: Path, days: int = 2) -> Path:
    """An authority, kept if it is there, and a certificate of each process, for localhost too; returns the directory.

    Args:
        directory: where.
        days: from now to their end; -1: they ran out yesterday.
    """
    subprocess.run([SCRIPT, directory], env={**os.environ, "DAYS": str(days)}, check=True, capture_output=True)
    return directory


def hosts(certificate: Path) -> list[str]:
    """The names that a certificate is for."""
    shown = subprocess.run(
        [OPENSSL, "x509", "-in", certificate, "-noout", "-ext", "subjectAltName"],
        check=True,
        capture_output=True,
        text=True,
    )
    return re.findall(r"DNS:([\w-]+)", shown.stdout)


def server(directory: Path, name: str) -> grpc.ServerCredentials:
    """Of a process that wants certificates of its callers."""
    key, chain, authority = [(directory / file).read_bytes() for file in (f"{name}.key", f"{name}.crt", "ca.crt")]
    return grpc.ssl_server_credentials([(key, chain)], authority, require_client_auth=True)


def caller(directory: Path, name: str) -> grpc.ChannelCredentials:
    """Of a process that shows its certificate."""
    authority, key, chain = [(directory / file).read_bytes() for file in ("ca.crt", f"{name}.key", f"{name}.crt")]
    return grpc.ssl_channel_credentials(authority, key, chain)
