"""`python -m services.common.healthcheck HOST:PORT`: asks `grpc.health.v1` once, for containers without shell or curl.

Exit code 0: it serves. 1: it does not, or does not answer; why is one line on standard error. Knows no service, and
imports nothing but grpc: it runs every few seconds beside a process that has work to do. For a process behind TLS: its
certificate, or that of its authority, and a name that the certificate is for. Where it asks for certificates of its
callers, the process's own key, too: it shows itself its own.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grpc

TIMEOUT_S = 2.0
USAGE = "usage: python -m services.common.healthcheck HOST:PORT [CERTIFICATE NAME [KEY]]"
_CHECK = "/grpc.health.v1.Health/Check"
_STATUS = {b"": "UNKNOWN", b"\x08\x01": "SERVING", b"\x08\x02": "NOT_SERVING", b"\x08\x03": "SERVICE_UNKNOWN"}


def check(
    address: str, certificate: Path | None = None, name: str = "", key: Path | None = None, timeout_s: float = TIMEOUT_S
) -> str:
    """What the health service there says of the whole process, or the status of a call that failed.

    Raises:
        OSError: the certificate or the key cannot be read.
    """
    if certificate is None:
        channel = grpc.insecure_channel(address)
    else:
        chain = certificate.read_bytes()
        shown = (key.read_bytes(), chain) if key is not None else ()
        credentials = grpc.ssl_channel_credentials(chain, *shown)
        channel = grpc.secure_channel(address, credentials, options=[("grpc.ssl_target_name_override", name)])
    with channel:
        ask = channel.unary_unary(_CHECK, request_serializer=bytes, response_deserializer=bytes)
        try:
            return _STATUS.get(bytes(ask(b"", timeout=timeout_s)), "UNKNOWN")
        except grpc.RpcError as error:
            return str(error.code().name) if hasattr(error, "code") else "UNKNOWN"


def main(arguments: list[str]) -> int:
    """Runs the check; returns the exit code."""
    if len(arguments) not in (1, 3, 4) or ":" not in arguments[0]:
        sys.stderr.write(USAGE + "\n")
        return 2
    address, *encrypted = arguments
    try:
        answer = check(address, *_encryption(*encrypted))
    except OSError as error:
        answer = f"{error.filename}: {error.strerror}"
    if answer != "SERVING":
        sys.stderr.write(f"{address}: {answer}\n")
    return 0 if answer == "SERVING" else 1


def _encryption(certificate: str = "", name: str = "", key: str = "") -> tuple[Path | None, str, Path | None]:
    return Path(certificate) if certificate else None, name, Path(key) if key else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
