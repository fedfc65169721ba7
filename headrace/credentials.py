"""TLS and API keys of the clients. Knows no stub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import grpc

Tls = bool | str | Path


def channel_credentials(
    tls: Tls, client_certificate: tuple[str | Path, str | Path] | None
) -> grpc.ChannelCredentials | None:
    """What a channel is opened with; None: plain text.

    Args:
        tls: True: TLS, by the authorities of this machine. A path: by those in this file, PEM. False: plain text.
        client_certificate: paths of certificate chain and private key, PEM, that prove who calls.

    Raises:
        ValueError: a client certificate without TLS.
        OSError: a file cannot be read.
    """
    if not tls:
        if client_certificate is not None:
            raise ValueError("client_certificate needs tls")
        return None
    authorities = None if isinstance(tls, bool) else Path(tls).read_bytes()
    chain, key = [Path(path).read_bytes() for path in client_certificate] if client_certificate else (None, None)
    return grpc.ssl_channel_credentials(authorities, key, chain)


def with_key(headers: Mapping[str, str] | None, api_key: str | None) -> dict[str, str]:
    """Headers of every call."""
    return {**(headers or {}), **({"authorization": f"Bearer {api_key}"} if api_key else {})}
