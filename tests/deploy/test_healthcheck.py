"""The health check of the containers."""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common import healthcheck
from tests.deploy.stack import ROOT


@pytest.mark.parametrize(("status", "code"), [("SERVING", 0), ("NOT_SERVING", 1)])
def test_says_what_the_process_says(status: str, code: int) -> None:
    """0 while it serves, 1 while it does not."""
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.ServingStatus.Value(status))
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "services.common.healthcheck", address],
            check=False,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    finally:
        server.stop(None).wait()
    assert (done.returncode, done.stderr.strip()) == (code, "" if code == 0 else f"{address}: {status}")


def test_nobody_there() -> None:
    """1, and one line, where nobody listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        assert healthcheck.check(f"127.0.0.1:{reserved.getsockname()[1]}", timeout_s=1.0) in (
            "UNAVAILABLE",
            "DEADLINE_EXCEEDED",
        )


def test_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """2 without an address."""
    assert healthcheck.main([]) == 2
    assert healthcheck.USAGE in capsys.readouterr().err
