"""The health check of the containers."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common import healthcheck
from tests import certificates
from tests.deploy.stack import ROOT


@contextmanager
def process(status: str, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """A server whose health says `status`; its address."""
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.ServingStatus.Value(status))
    server = grpc.server(ThreadPoolExecutor(1))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    place = "127.0.0.1:0"
    port = server.add_secure_port(place, credentials) if credentials else server.add_insecure_port(place)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def run(*arguments: str) -> tuple[int, str]:
    """Exit code and standard error of the check, as a container runs it."""
    command = [sys.executable, "-m", "services.common.healthcheck", *arguments]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(("status", "code"), [("SERVING", 0), ("NOT_SERVING", 1)])
def test_says_what_the_process_says(status: str, code: int) -> None:
    """0 while it serves, 1 and one line while it does not."""
    with process(status) as address:
        assert run(address) == (code, "" if code == 0 else f"{address}: {status}")


def test_nobody_there() -> None:
    """1 where nobody listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        assert healthcheck.check(f"127.0.0.1:{reserved.getsockname()[1]}", timeout_s=1.0) != "SERVING"


def test_behind_tls(tmp_path: Path) -> None:
    """With the server's certificate and a name that it is for; any other certificate is not trusted."""
    ours, other = certificates.make(tmp_path / "ours"), certificates.make(tmp_path / "other")
    key, chain = [(ours / f"public.{kind}").read_bytes() for kind in ("key", "crt")]
    with process("SERVING", grpc.ssl_server_credentials([(key, chain)])) as address:
        assert run(address, str(ours / "public.crt"), "gateway") == (0, "")
        assert run(address, str(other / "public.crt"), "gateway")[0] == 1
        assert run(address, str(tmp_path / "none.crt"), "gateway")[0] == 1


def test_where_callers_need_certificates(tmp_path: Path) -> None:
    """The process shows itself its own; without the key it is not let in, and a missing key is named."""
    made = certificates.make(tmp_path / "made")
    own = [str(made / "engine.crt"), "engine", str(made / "engine.key")]
    with process("SERVING", certificates.server(made, "engine")) as address:
        assert run(address, *own) == (0, "")
        assert run(address, *own[:2])[0] == 1
        missing = str(tmp_path / "none.key")
        assert run(address, *own[:2], missing) == (1, f"{address}: {missing}: No such file or directory")


def test_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """2 without an address."""
    assert healthcheck.main([]) == 2
    assert healthcheck.USAGE in capsys.readouterr().err
