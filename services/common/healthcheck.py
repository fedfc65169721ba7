"""`python -m services.common.healthcheck HOST:PORT`: asks `grpc.health.v1` once, for containers without a shell or curl.

Exit code 0: it serves. 1: it does not, or does not answer; why is one line on standard error. Knows no service, and
imports nothing but grpc: it runs every few seconds beside a process that has work to do.
"""

from __future__ import annotations

import sys

import grpc

TIMEOUT_S = 2.0
USAGE = "usage: python -m services.common.healthcheck HOST:PORT"
_CHECK = "/grpc.health.v1.Health/Check"
_STATUS = {b"": "UNKNOWN", b"\x08\x01": "SERVING", b"\x08\x02": "NOT_SERVING", b"\x08\x03": "SERVICE_UNKNOWN"}


def check(address: str, timeout_s: float = TIMEOUT_S) -> str:
    """What the health service there says of the whole process, or the status of a call that failed."""
    with grpc.insecure_channel(address) as channel:
        ask = channel.unary_unary(_CHECK, request_serializer=bytes, response_deserializer=bytes)
        try:
            return _STATUS.get(bytes(ask(b"", timeout=timeout_s)), "UNKNOWN")
        except grpc.RpcError as error:
            return str(error.code().name) if isinstance(error, grpc.Call) else "UNKNOWN"


def main(arguments: list[str]) -> int:
    """Runs the check; returns the exit code."""
    if len(arguments) != 1 or ":" not in arguments[0]:
        sys.stderr.write(USAGE + "\n")
        return 2
    answer = check(arguments[0])
    if answer != "SERVING":
        sys.stderr.write(f"{arguments[0]}: {answer}\n")
    return 0 if answer == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
