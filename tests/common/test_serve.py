"""A process has one visible life: starting, serving, draining, stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from headrace import errors
from headrace.answers import error_of as error_of_call
from headrace.cli import ports
from headrace.v1 import gateway_pb2, gateway_pb2_grpc

ROOT = Path(__file__).parent.parent.parent
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

# A service whose start waits for a file, and whose one call runs until its generation's metadata says.
DEMO = textwrap.dedent("""
    import asyncio, os, sys
    from dataclasses import dataclass
    from pathlib import Path
    from headrace.v1 import gateway_pb2, gateway_pb2_grpc
    from services.common import serve
    from services.common.logs import LogSettings
    from services.common.telemetry import TelemetrySettings
    from services.common.tls import PeerTlsSettings, TlsSettings

    @dataclass(frozen=True)
    class Settings:
        server: serve.ServerSettings = serve.ServerSettings()
        tls: TlsSettings = TlsSettings()
        peer_tls: PeerTlsSettings = PeerTlsSettings()
        trace: TelemetrySettings = TelemetrySettings()
        log: LogSettings = LogSettings()

    class Gateway(gateway_pb2_grpc.GatewayServiceServicer):
        inside = 0
        async def GenerateStream(self, request, call):
            Gateway.inside += 1
            try:
                await call.write(gateway_pb2.GenerateStreamResponse(sequence_number=0))
                if request.generation.max_tokens:
                    while not Path(os.environ["FINISH"]).exists():
                        await asyncio.sleep(0.01)
                else:
                    await asyncio.Event().wait()
            finally:
                Gateway.inside -= 1

    class Demo:
        name = "demo"
        def register(self, server):
            gateway_pb2_grpc.add_GatewayServiceServicer_to_server(Gateway(), server)
            return ["headrace.v1.GatewayService"]
        async def start(self):
            while not Path(os.environ["GO"]).exists():
                await asyncio.sleep(0.01)
            if Path(os.environ["GO"]).read_text() == "fail":
                raise serve.StartError("weights.bin: the file is cut short")
        async def failure(self):
            while not Path(os.environ["BREAK"]).exists():
                await asyncio.sleep(0.01)
            return "the loop died"
        async def drain(self, calls_ended):
            while Gateway.inside:
                await asyncio.sleep(0.01)
        async def stop(self):
            pass

    raise SystemExit(serve.main("demo", Settings, lambda *parts: Demo()))
""")


class Process:
    """The demo as a child process."""

    def __init__(self, tmp_path, **environ):
        self.port = ports.free("127.0.0.1", 1)[0]
        self.files = {name: tmp_path / name for name in ("GO", "BREAK", "FINISH")}
        (tmp_path / "demo.py").write_text(DEMO, encoding="utf-8")
        self.child = subprocess.Popen(
            [sys.executable, tmp_path / "demo.py"],
            env={
                **os.environ,
                **{name: str(path) for name, path in self.files.items()},
                "HEADRACE_DEMO_PORT": str(self.port),
                "HEADRACE_DEMO_GRACE_S": "5",
                "PYTHONPATH": str(ROOT),
                **environ,
            },
            stderr=subprocess.PIPE,
            text=True,
        )
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self.port}")
        self.health = health_pb2_grpc.HealthStub(self.channel)
        self.stub = gateway_pb2_grpc.GatewayServiceStub(self.channel)

    def statuses(self):
        """Health statuses as Watch reports them."""
        watch = self.health.Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=30)
        with contextlib.suppress(grpc.RpcError):
            for answer in watch:
                yield answer.status

    def go(self, word="go"):
        self.files["GO"].write_text(word)

    def stream(self, *, finite):
        generation = {"max_tokens": 1} if finite else {}
        call = self.stub.GenerateStream(gateway_pb2.GenerateStreamRequest(generation=generation), timeout=30)
        next(call)
        return call

    def end(self):
        _, stderr = self.child.communicate(timeout=15)
        self.channel.close()
        return self.child.returncode, stderr


@pytest.fixture
def process(tmp_path):
    process = Process(tmp_path)
    yield process
    process.channel.close()
    if process.child.poll() is None:
        process.child.kill()
    process.child.communicate()


def error_of(call) -> errors.HeadraceError:
    with pytest.raises(grpc.RpcError) as caught:
        for _ in call:
            pass
    return error_of_call(caught.value)


def test_starting_then_serving_then_draining(process):
    """NOT_SERVING until started; SERVING; on SIGTERM NOT_SERVING, new calls refused, open ones end OK."""
    statuses = process.statuses()
    assert next(statuses) == NOT_SERVING
    assert error_of(process.stub.GenerateStream(gateway_pb2.GenerateStreamRequest())).reason == "STARTING"
    process.go()
    assert next(statuses) == SERVING
    open_call = process.stream(finite=True)
    process.child.send_signal(signal.SIGTERM)
    assert next(statuses) == NOT_SERVING
    assert error_of(process.stub.GenerateStream(gateway_pb2.GenerateStreamRequest())).reason == "SHUTTING_DOWN"
    process.files["FINISH"].write_text("x")
    assert list(open_call) == []
    assert open_call.code() is grpc.StatusCode.OK
    assert process.end()[0] == 0


def test_a_second_signal_forces(process):
    """Open calls end UNAVAILABLE at once, exit code 0."""
    process.go()
    statuses = process.statuses()
    while next(statuses) != SERVING:
        pass
    open_call = process.stream(finite=False)
    process.child.send_signal(signal.SIGTERM)
    while next(statuses) != NOT_SERVING:
        pass
    process.child.send_signal(signal.SIGTERM)
    error = error_of(open_call)
    assert (type(error), error.reason) == (errors.Unavailable, "SHUTTING_DOWN")
    code, stderr = process.end()
    assert code == 0
    assert "Task was destroyed" not in stderr
    assert "Traceback" not in stderr


def test_the_grace_period_is_the_end(tmp_path):
    """After the grace period the rest ends UNAVAILABLE; exit code 0 within grace + 2 s."""
    process = Process(tmp_path, HEADRACE_DEMO_GRACE_S="0.3")
    process.go()
    statuses = process.statuses()
    while next(statuses) != SERVING:
        pass
    open_call = process.stream(finite=False)
    process.child.send_signal(signal.SIGINT)
    assert error_of(open_call).reason == "SHUTTING_DOWN"
    assert process.child.wait(timeout=2.3) == 0
    process.end()


def test_a_start_that_fails_says_why_and_exits(process):
    """One line with the reason, exit code 1, never SERVING."""
    process.go("fail")
    code, stderr = process.end()
    assert code == 1
    assert "weights.bin: the file is cut short" in stderr
    assert "Traceback" not in stderr


def test_a_failure_while_serving_ends_the_process(process):
    """A background failure: the reason, open calls UNAVAILABLE, exit code 1."""
    process.go()
    statuses = process.statuses()
    while next(statuses) != SERVING:
        pass
    open_call = process.stream(finite=False)
    process.files["BREAK"].write_text("x")
    assert error_of(open_call).reason == "SHUTTING_DOWN"
    code, stderr = process.end()
    assert code == 1
    assert "the loop died" in stderr


def test_a_port_in_use_is_named(tmp_path, process):
    """A second process on the same port does not share it silently."""
    process.go()
    statuses = process.statuses()
    while next(statuses) != SERVING:
        pass
    second = Process(tmp_path, HEADRACE_DEMO_PORT=str(process.port))
    code, stderr = second.end()
    assert code == 1
    assert f"127.0.0.1:{process.port}" in stderr


def test_bad_settings_end_it_before_anything(tmp_path):
    """Every bad variable by name, exit code 1."""
    second = Process(tmp_path, HEADRACE_DEMO_GRACE_S="soon", HEADRACE_TRACE_LEVEL="9", HEADRACE_DEMO_GRACE="1")
    code, stderr = second.end()
    assert code == 1
    for name in ("HEADRACE_DEMO_GRACE_S='soon'", "HEADRACE_TRACE_LEVEL='9'", "HEADRACE_DEMO_GRACE:"):
        assert name in stderr


def test_reflection_lists_the_services(process):
    """Grpcurl and friends can look."""
    process.go()
    stub = reflection_pb2_grpc.ServerReflectionStub(process.channel)
    asked = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
    answer = next(stub.ServerReflectionInfo(asked, wait_for_ready=True, timeout=30))
    names = {service.name for service in answer.list_services_response.service}
    assert {"headrace.v1.GatewayService", "grpc.health.v1.Health"} <= names


def test_many_watchers_do_not_hinder_the_end(process):
    """Health watchers that stay are no reason to stay alive."""
    process.go()
    watchers = [threading.Thread(target=lambda: list(process.statuses()), daemon=True) for _ in range(5)]
    for watcher in watchers:
        watcher.start()
    statuses = process.statuses()
    while next(statuses) != SERVING:
        pass
    process.child.send_signal(signal.SIGTERM)
    assert process.end()[0] == 0
    for watcher in watchers:
        watcher.join(10)
