"""More gateways, and more engines, beside a running pipeline: they share its tokenizer, stream process and engine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace import Client
from headrace.cli import ports
from headrace.cli.supervisor import Program, Supervisor


@dataclass
class Process:
    """A process of its own beside a pipeline."""

    address: str
    supervisor: Supervisor
    credentials: grpc.ChannelCredentials | None = None

    def client(self, **arguments) -> Client:
        return Client(self.address, credentials=self.credentials, **arguments)


def serves(address: str, credentials: grpc.ChannelCredentials | None = None) -> Callable[[], bool]:
    """Whether a process says that it serves."""

    def ask() -> bool:
        channel = grpc.secure_channel(address, credentials) if credentials else grpc.insecure_channel(address)
        with channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
            except grpc.RpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return ask


@contextmanager
def start_process(name: str, credentials: grpc.ChannelCredentials | None = None, **variables: str) -> Iterator[Process]:
    """A service on a free port; `variables` are settings by name, HEADRACE_ left out, {port} in them is that port."""
    port = ports.free("127.0.0.1", 1)[0]
    settings = {
        **os.environ,
        f"HEADRACE_{name.upper()}_PORT": str(port),
        "HEADRACE_TRACE_LEVEL": "0",
        **{f"HEADRACE_{key}": value.replace("{port}", str(port)) for key, value in variables.items()},
    }
    supervisor = Supervisor((Program(name, (sys.executable, "-m", f"services.{name}"), settings),))
    supervisor.start()
    address = f"localhost:{port}" if credentials else f"127.0.0.1:{port}"
    try:
        supervisor.wait_ready(serves(address, credentials), 60)
        yield Process(address, supervisor, credentials)
    finally:
        supervisor.stop(at_once=True)


@contextmanager
def start_gateway(pipeline, credentials: grpc.ChannelCredentials | None = None, **variables: str) -> Iterator[Process]:
    """Another gateway in front of a running pipeline's other processes."""
    addresses = {
        "GATEWAY_TOKENIZER_ADDRESS": pipeline.plan.addresses["tokenizer"],
        "GATEWAY_STREAM_ADDRESS": pipeline.plan.addresses["stream"],
        "GATEWAY_ENGINE_ADDRESSES": pipeline.plan.addresses["engine"],
    }
    with start_process("gateway", credentials, **{**addresses, **variables}) as process:
        yield process
