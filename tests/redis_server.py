"""A real Redis on a free port, without files, for tests."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import redis

from headrace.cli import ports


class RedisServer:
    """`url` is what services are told. `stop` and `start` keep the port.

    Args:
        password: what it wants; "": nothing.
        certificates: directory of `tests.certificates`; it then speaks TLS alone, and wants certificates.
    """

    def __init__(self, password: str = "", certificates: Path | None = None) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise FileNotFoundError("redis-server is needed: Debian package redis-server")
        self._binary, self.password = binary, password
        self.port = ports.free("127.0.0.1", 1)[0]
        host = "localhost" if certificates else "127.0.0.1"
        self.url = f"redis://{f':{password}@' if password else ''}{host}:{self.port}/0"
        self._options = ["--requirepass", password] if password else []
        self.client = redis.Redis(port=self.port, password=password or None)
        if certificates is None:
            self._options += ["--port", str(self.port)]
        else:
            files = {name: str(certificates / name) for name in ("redis.crt", "redis.key", "ca.crt")}
            cert, key, authority = files.values()
            self._options += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "yes"]
            self._options += ["--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", authority]
            self.client = redis.Redis(
                host, self.port, ssl=True, ssl_ca_certs=authority, ssl_certfile=cert, ssl_keyfile=key
            )
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts it and waits until it answers."""
        command = [self._binary, *self._options, "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 10
        while True:
            try:
                self.client.ping()
            except redis.ConnectionError:
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.01)
            else:
                return

    def stop(self) -> None:
        """Ends it; what it held is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def close(self) -> None:
        """Ends it for good."""
        self.stop()
        self.client.close()
