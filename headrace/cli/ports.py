"""Ports of this machine: which are free, and who holds one that is not. Knows no service."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path

_LISTEN = "0A"  # state of a listening socket in /proc/net/tcp


def check(host: str, port: int) -> str:
    """Why `host:port` cannot be listened on, in one clause; "" if it can."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except socket.gaierror:
        return f"{host!r} is no address of a machine"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is in use by {owner(port) or 'a process that cannot be seen'}"
        return f"{host}:{port} cannot be listened on ({os.strerror(error.errno or 0)})"
    return ""


def free(host: str, count: int) -> list[int]:
    """`count` different ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            probe = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            probe.bind((host, 0))
            ports.append(int(probe.getsockname()[1]))
        return ports


def owner(port: int) -> str:
    """The process that listens on a port: "pid 123 (python -m services.engine)"; "" where that cannot be seen."""
    inodes = _listening_inodes(port)
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            for descriptor in (directory / "fd").iterdir():
                with contextlib.suppress(OSError):
                    target = str(descriptor.readlink())
                    if target.startswith("socket:[") and target[8:-1] in inodes:
                        return f"pid {directory.name} ({_command(directory)})"
    return ""


def _listening_inodes(port: int) -> set[str]:
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                columns = line.split()
                if columns[3] == _LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                    inodes.add(columns[9])
    return inodes


def _command(directory: Path, limit: int = 100) -> str:
    words: Sequence[bytes] = (directory / "cmdline").read_bytes().split(b"\0")
    text = " ".join(word.decode(errors="replace") for word in words if word)
    return text if len(text) <= limit else text[: limit - 1] + "…"
