"""One visible life for every process: start, serve, drain, stop. Knows no service.

    STARTING   the port answers: health NOT_SERVING, calls UNAVAILABLE (STARTING)
    SERVING    `start()` of the service has returned, which includes one real generation
    DRAINING   first SIGTERM or SIGINT: NOT_SERVING, new calls UNAVAILABLE (SHUTTING_DOWN), open ones may end
    STOPPED    all ended, or the grace period is over (the rest end UNAVAILABLE), or a second signal came

A service that fails to start, or fails while serving, says why in one line and ends the process with code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeVar

import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from headrace import channels, errors
from services.common import logs, metric_names, scheduling, settings, tls
from services.common.calls import SHUTDOWN_MESSAGE, CallInterceptor
from services.common.settings import setting
from services.common.telemetry import Telemetry, TelemetrySettings
from services.common.tls import PeerTlsSettings, TlsSettings

FAILED = 1
FLUSH_S = 0.25  # so that the last statuses leave before the connections do
S = TypeVar("S", bound="ProcessSettings")


class StartError(Exception):
    """The service cannot start, or cannot go on; the message is one line for the person who reads the log."""


@dataclass(frozen=True)
class ServerSettings:
    """Where a process listens and how it ends."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(0, "port to listen on", minimum=0, maximum=65535)
    metrics_port: int = setting(0, "port of the Prometheus endpoint; 0: none", minimum=0, maximum=65535)
    grace_s: float = setting(30.0, "seconds that open calls may take to end", minimum=0.0, maximum=86_400.0)

    @property
    def address(self) -> str:
        """host:port."""
        return f"{self.host}:{self.port}"


class ProcessSettings(Protocol):
    """What the settings of every service hold."""

    @property
    def server(self) -> ServerSettings:
        """Where it listens and how it ends."""

    @property
    def tls(self) -> TlsSettings:
        """How its port is encrypted."""

    @property
    def peer_tls(self) -> PeerTlsSettings:
        """How its calls are encrypted."""

    @property
    def trace(self) -> TelemetrySettings:
        """Where spans go."""

    @property
    def log(self) -> logs.LogSettings:
        """What is logged."""


class Service(ABC):
    """What `serve` needs of a service."""

    name: str

    @abstractmethod
    def register(self, server: grpc.aio.Server) -> list[str]:
        """Adds the servicers; returns their full names."""

    @abstractmethod
    async def start(self) -> None:
        """Returns when ready to serve. Raises StartError."""

    async def failure(self) -> str:
        """Returns, with the reason, if the service fails later; else never."""
        await asyncio.Event().wait()
        return ""

    async def drain(self, calls_ended: Callable[[], Awaitable[object]]) -> None:
        """Returns when no work is left (new calls are refused by then).

        Args:
            calls_ended: returns when no call is open; for services whose every call ends.
        """
        await calls_ended()

    @abstractmethod
    async def stop(self) -> None:
        """Frees everything; bounded."""


class State(Enum):
    """Where a process is in its life."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"


class _Life:
    """State, signals and what they mean to calls."""

    def __init__(self) -> None:
        self.state = State.STARTING
        self.asked_to_stop = asyncio.Event()
        self.forced = asyncio.Event()

    def on_signal(self) -> None:
        (self.forced if self.asked_to_stop.is_set() else self.asked_to_stop).set()

    def refusal(self) -> errors.HeadraceError | None:
        if self.state is State.STARTING:
            return errors.Unavailable("the server is starting", reason=errors.Reason.STARTING, retry_after_s=1.0)
        if self.state in (State.DRAINING, State.STOPPED):
            return errors.Unavailable(SHUTDOWN_MESSAGE, reason=errors.Reason.SHUTTING_DOWN)
        return None


def main(name: str, cls: type[S], build: Callable[[S, Telemetry, logs.Log], Service]) -> int:
    """Runs a service from the environment to its end; returns the exit code.

    Args:
        name: name of the process, also the section of its settings.
        cls: its settings.
        build: makes the service.
    """
    try:
        loaded = settings.load(cls, os.environ, name)
        tls.check(name, loaded.tls, loaded.peer_tls)
    except settings.SettingsError as error:
        for problem in error.problems:
            sys.stderr.write(f"headrace {name}: {problem}\n")
        return FAILED
    scheduling.give_way()
    log = logs.configure(name, loaded.log)
    try:
        return uvloop.run(_serve(name, loaded, build, log))
    finally:
        logs.close()


async def _serve(name: str, loaded: S, build: Callable[[S, Telemetry, logs.Log], Service], log: logs.Log) -> int:
    life = _Life()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, life.on_signal)
    telemetry = Telemetry(name, loaded.trace, credentials=loaded.peer_tls.credentials())
    interceptor = CallInterceptor(telemetry, log, life.refusal)
    server = grpc.aio.server(interceptors=[interceptor], options=channels.SERVER_OPTIONS)
    health_servicer = health.aio.HealthServicer()
    service: Service | None = None
    try:
        service = build(loaded, telemetry, log)
        names = service.register(server)
        for watched in ("", *names):
            await health_servicer.set(watched, health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        reflection.enable_server_reflection((*names, "grpc.health.v1.Health", reflection.SERVICE_NAME), server)
        _listen(server, loaded.server, loaded.tls, log)
        _offer_metrics(telemetry, loaded.server, log)
        await server.start()
        await _until_stopped(life, service, health_servicer, log, loaded.server, names)
        await _drain(life, service, interceptor, loaded.server.grace_s, log)
    except StartError as error:
        log.error("cannot go on", reason=str(error))
        life.state = State.STOPPED
        await health_servicer.enter_graceful_shutdown()
        await _end_open_calls(interceptor)
        return FAILED
    finally:
        await server.stop(FLUSH_S)
        if service is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(service.stop(), 1.0)
        telemetry.shutdown()
        telemetry.metrics.close()
        log.info("stopped", spans_exported=telemetry.counts.exported, spans_dropped=telemetry.dropped)
    return 0


def _listen(server: grpc.aio.Server, where: ServerSettings, encrypted: TlsSettings, log: logs.Log) -> None:
    credentials = encrypted.credentials(log)
    try:
        if credentials is None:
            server.add_insecure_port(where.address)
        else:
            server.add_secure_port(where.address, credentials)
    except RuntimeError as error:
        raise StartError(f"cannot listen on {where.address}: the port is in use or the address is not ours") from error


class SidePort:
    """A further port of a process, whose calls are treated like those of the first.

    Args:
        telemetry: spans.
        log: where faults go.
        where: to listen.
        encrypted: whether and how.
    """

    def __init__(self, telemetry: Telemetry, log: logs.Log, where: ServerSettings, encrypted: TlsSettings) -> None:
        interceptor = CallInterceptor(telemetry, log, lambda: None)
        self.server = grpc.aio.server(interceptors=[interceptor], options=channels.SERVER_OPTIONS)
        self._where, self._encrypted, self._log = where, encrypted, log

    async def open(self, *names: str) -> None:
        """Listens; reflection tells of the services in `names`. Raises StartError."""
        reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self.server)
        _listen(self.server, self._where, self._encrypted, self._log)
        await self.server.start()

    async def close(self) -> None:
        """Ends it and its calls."""
        await self.server.stop(0)


def _offer_metrics(telemetry: Telemetry, where: ServerSettings, log: logs.Log) -> None:
    if not where.metrics_port:
        return
    telemetry.metrics.each_second(lambda: _sample_logs(telemetry))
    try:
        telemetry.metrics.start(where.host, where.metrics_port, asyncio.get_running_loop())
    except OSError as error:
        address = f"{where.host}:{where.metrics_port}"
        raise StartError(f"cannot offer metrics on {address}: {error.strerror or error}") from error
    log.info("metrics", address=f"http://{where.host}:{where.metrics_port}/metrics")


def _sample_logs(telemetry: Telemetry) -> None:
    counts = logs.counts()
    telemetry.metrics.total(metric_names.LOGS_WRITTEN, counts.written)
    telemetry.metrics.total(metric_names.LOGS_DROPPED, counts.dropped)
    telemetry.metrics.total(metric_names.LOGS_SAMPLED_OUT, counts.sampled_out)


async def _until_stopped(
    life: _Life,
    service: Service,
    health_servicer: health.aio.HealthServicer,
    log: logs.Log,
    where: ServerSettings,
    names: list[str],
) -> None:
    """Starts the service, serves, and returns when asked to stop. Raises StartError when it fails."""
    asked = asyncio.ensure_future(life.asked_to_stop.wait())
    start = asyncio.ensure_future(service.start())
    failure = asyncio.ensure_future(service.failure())
    try:
        await asyncio.wait({asked, start, failure}, return_when=asyncio.FIRST_COMPLETED)
        if start.done() and not asked.done():
            start.result()
            life.state = State.SERVING
            for watched in ("", *names):
                await health_servicer.set(watched, health_pb2.HealthCheckResponse.SERVING)
            log.info("serving", address=where.address)
            await asyncio.wait({asked, failure}, return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            raise StartError(failure.result())
        life.state = State.DRAINING
        await health_servicer.enter_graceful_shutdown()
    finally:
        for task in (asked, start, failure):
            task.cancel()
        await asyncio.gather(asked, start, failure, return_exceptions=True)


async def _drain(life: _Life, service: Service, interceptor: CallInterceptor, grace_s: float, log: logs.Log) -> None:
    """Lets open work end; what is left after the grace period, or at a second signal, ends UNAVAILABLE."""
    log.info("draining", open_calls=len(interceptor.open), grace_s=grace_s)
    drained = asyncio.ensure_future(service.drain(interceptor.idle.wait))
    forced = asyncio.ensure_future(life.forced.wait())
    await asyncio.wait({drained, forced}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (drained, forced):
        task.cancel()
    await asyncio.gather(drained, forced, return_exceptions=True)
    life.state = State.STOPPED
    await _end_open_calls(interceptor)


async def _end_open_calls(interceptor: CallInterceptor) -> None:
    for call in list(interceptor.open):
        call.end_by_shutdown()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(interceptor.idle.wait(), 1.0)
