"""Collectors of spans that are well, or are not: each a process of its own that keeps nothing. Knows no service."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from multiprocessing.connection import Connection

import grpc

WELL = "well"
MOODS = (WELL, "absent", "refusing", "slow", "paused")
SLOW_S = 3.0  # longer than the services wait for an answer
_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@contextmanager
def collector(mood: str = WELL) -> Iterator[str]:
    """The endpoint of a collector, for as long as the `with` block lasts.

    Args:
        mood: "well" takes everything; "refusing" answers with an error; "slow" answers when nobody waits any more;
            "paused" is a process that is stopped (SIGSTOP) while its connections are open; "absent": nobody listens.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_collect, args=(mood, there), daemon=True)
    process.start()
    port = here.recv()
    pid = process.pid or 0
    if mood == "absent":
        _end(here, process)
    elif mood == "paused":
        os.kill(pid, signal.SIGSTOP)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        if mood == "paused":
            os.kill(pid, signal.SIGCONT)
        if mood != "absent":
            _end(here, process)


def _end(pipe: Connection, process: multiprocessing.process.BaseProcess) -> None:
    pipe.send(None)
    process.join(5)


def _collect(mood: str, ready: Connection) -> None:
    """The process: serves until it is told to end."""

    def take(_spans: bytes, call: grpc.ServicerContext) -> bytes:
        if mood == "refusing":
            call.abort(grpc.StatusCode.INTERNAL, "no")
        if mood == "slow":
            time.sleep(SLOW_S)
        return b""

    server = grpc.server(futures.ThreadPoolExecutor(4))
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {"Export": grpc.unary_unary_rpc_method_handler(take)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ready.send(port)
    ready.recv()
    server.stop(None)
