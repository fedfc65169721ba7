"""A real Redis on a free port, without files, for tests."""

from __future__ import annotations

import shutil
import subprocess
import time

import redis

from headrace.cli import ports


class RedisServer:
    """`url` is what services are told. `stop` and `start` keep the port."""

    def __init__(self) -> None:
        binary = shutil.which("redis-server")
        if binary is None:
            raise FileNotFoundError("redis-server is needed: Debian package redis-server")
        self._binary = binary
        self.port = ports.free("127.0.0.1", 1)[0]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.client = redis.Redis(port=self.port)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts it and waits until it answers."""
        command = [self._binary, "--port", str(self.port), "--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
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
