"""What a caller notices while others mean harm: times of a closed loop alone, and during each attack, by turns."""

from __future__ import annotations

import contextlib
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from headrace import Client
from headrace.bench.results import quantile
from tests.bench_gateway.stage import stage, tiny_model
from tests.pipeline.test_attacks import GENERATE, PREFACE, SESSION

REQUESTS = 150  # of a turn
TURNS = 3
FLOODERS = 4
FLOOD_PAUSE_S = 0.01
MOST_RATIO = 1.5


@contextlib.contextmanager
def idle_connections(target: str) -> Iterator[None]:
    """1,000 connections: half say nothing, half begin a preface and stop."""
    host, port = target.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        for number in range(1000):
            idle = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            if number % 2:
                idle.sendall(PREFACE[: 10 + number % 30])
        yield


@contextlib.contextmanager
def slow_opens(target: str) -> Iterator[None]:
    """200 sessions that are opened and never say what they want."""
    done = threading.Event()

    def never() -> Iterator[bytes]:
        done.wait()
        yield from ()

    with grpc.insecure_channel(target) as channel:
        session = channel.stream_stream(SESSION, request_serializer=bytes, response_deserializer=bytes)
        calls = [session(never(), timeout=60) for _ in range(200)]
        try:
            yield
        finally:
            done.set()
            for call in calls:
                call.cancel()


@contextlib.contextmanager
def header_floods(target: str) -> Iterator[None]:
    """Four callers that send 20 KB of headers a hundred times a second each."""
    done = threading.Event()

    def flood() -> None:
        with grpc.insecure_channel(target, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
            call = channel.unary_unary(GENERATE, request_serializer=bytes, response_deserializer=bytes)
            while not done.wait(FLOOD_PAUSE_S):
                with contextlib.suppress(grpc.RpcError):
                    call(b"", timeout=5, metadata=(("authorization", "Bearer " + "k" * 20_000),))

    threads = [threading.Thread(target=flood) for _ in range(FLOODERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


ATTACKS: dict[str, Callable[[str], contextlib.AbstractContextManager[None]]] = {
    "1,000 idle connections": idle_connections,
    "200 slow opens": slow_opens,
    "header floods": header_floods,
}


def main() -> dict[str, Any]:
    """Milliseconds of a request; a request that fails ends the measurement."""
    report: dict[str, Any] = {}
    with tiny_model() as model, stage(MODEL=str(model), ENGINE_DTYPE="float32") as pipeline:
        target = pipeline.plan.target
        with Client(target) as client:
            _turn(client)
            for name, attack in ATTACKS.items():
                alone, under = [], []
                for _ in range(TURNS):
                    alone += _turn(client)
                    with attack(target):
                        under += _turn(client)
                report[name] = {
                    "alone p50, p95": [round(quantile(alone, share) * 1e3, 2) for share in (0.5, 0.95)],
                    "under it p50, p95": [round(quantile(under, share) * 1e3, 2) for share in (0.5, 0.95)],
                    "p50 ratio": round(statistics.median(under) / statistics.median(alone), 2),
                }
    return {**report, "passed": all(one["p50 ratio"] <= MOST_RATIO for one in report.values())}


def _turn(client: Client) -> list[float]:
    took = []
    for _ in range(REQUESTS):
        began = time.monotonic()
        client.generate(token_ids=[5, 6, 7], max_tokens=4, ignore_eos=True, timeout=10)
        took.append(time.monotonic() - began)
    return took
