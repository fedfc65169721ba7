"""The four processes of one pipeline on this machine, as programs for the supervisor.

Knows the services by name and by their environment variables alone; imports none of them. A flag wins over the
environment, the environment over the file that `HEADRACE_CONFIG` names, as in the services themselves.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from headrace import channels
from headrace.cli import ports
from headrace.cli.supervisor import OnLine, Program, Supervisor

# In the order of starting; stopped the other way round: the gateway first, then stream, engine and tokenizer.
PORTS = {"tokenizer": 50051, "engine": 50053, "stream": 50052, "gateway": 50050}
METRICS_OFFSET = 10  # a process whose port was named, or is the usual one, offers its metrics ten ports above it
READY_TIMEOUT_S = 300.0
_HEALTH_CHECK = "/grpc.health.v1.Health/Check"
_SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}


class PipelineError(Exception):
    """The pipeline cannot be started as asked; the message is one line."""


class BadOption(PipelineError):
    """An option, variable or file says something that cannot be; the message names it."""


@dataclass(frozen=True)
class PipelineOptions:
    """What the caller asks for. What is None or absent is left to environment, file and defaults.

    `variables` are environment variables of the services, by name; `ports` are by process, 0: a free one. With
    `free_by_default`, ports that nobody names are free ones too, not the usual ones. `modules` are run in the place of
    `services.<process>`, by process.
    """

    variables: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    bind: str | None = None
    free_by_default: bool = False
    modules: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What is started: the programs and where the gateway can be called."""

    programs: tuple[Program, ...]
    addresses: Mapping[str, str]  # host:port by process, as the others call it
    target: str  # host:port of the gateway
    model: str | None  # None: the default model
    metrics: Mapping[str, str] = field(default_factory=dict)  # host:port by process, where they are offered


class _Sources:
    """Environment and file, with the environment first."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._tables: dict[str, object] = {}
        path = environ.get("HEADRACE_CONFIG")
        if path:
            try:
                self._tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
            except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise BadOption(f"HEADRACE_CONFIG={path}: cannot be read as TOML ({error})") from None

    def get(self, section: str, key: str) -> str | None:
        raw = self._environ.get("HEADRACE_" + "_".join(part for part in (section, key) if part).upper())
        if raw:
            return raw
        table = self._tables.get(section, {}) if section else self._tables
        value = table.get(key) if isinstance(table, dict) else None
        return None if value is None or isinstance(value, dict) else str(value)


def plan(options: PipelineOptions, environ: Mapping[str, str] | None = None) -> Plan:
    """What `options` mean here and now; nothing is started.

    Raises:
        BadOption: a value that cannot be, or two processes on one port.
        PipelineError: the services are not here, or a port is in use (which, and by whom).
    """
    root = services_root()
    environ = os.environ if environ is None else environ
    sources = _Sources({**environ, **options.variables})
    hosts = {name: sources.get(name, "host") or "127.0.0.1" for name in PORTS}
    hosts["gateway"] = options.bind or hosts["gateway"]
    asked = _ports(options, sources, hosts)
    metrics = _metrics_ports(asked, sources, hosts)
    chosen = iter(ports.free("127.0.0.1", len(asked)))
    numbers = {name: number or next(chosen) for name, number in asked.items()}
    addresses = {name: f"{_reachable(hosts[name])}:{numbers[name]}" for name in PORTS}
    offered = {name: f"{_reachable(hosts[name])}:{number}" for name, number in metrics.items() if number}
    variables = {
        **environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1",
        **({} if sources.get("log", "format") else {"HEADRACE_LOG_FORMAT": "console"}),
        **{f"HEADRACE_{name.upper()}_PORT": str(number) for name, number in numbers.items()},
        **{f"HEADRACE_{name.upper()}_METRICS_PORT": str(number) for name, number in metrics.items()},
        "HEADRACE_GATEWAY_HOST": hosts["gateway"],
        "HEADRACE_GATEWAY_TOKENIZER_ADDRESS": addresses["tokenizer"],
        "HEADRACE_GATEWAY_STREAM_ADDRESS": addresses["stream"],
        "HEADRACE_GATEWAY_ENGINE_ADDRESSES": addresses["engine"],
        **options.variables,
    }
    modules = {name: f"services.{name}" for name in PORTS} | dict(options.modules)
    programs = tuple(Program(name, (sys.executable, "-m", modules[name]), variables) for name in PORTS)
    return Plan(programs, addresses, addresses["gateway"], sources.get("", "model"), offered)


def services_root() -> Path:
    """Directory to import `services` from.

    Raises:
        PipelineError: it is not here; the published package holds the client and the command alone.
    """
    try:
        found = importlib.util.find_spec("services.gateway")
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        raise PipelineError("the services are not here: run this from a checkout of Headrace, or use its images")
    return Path(found.origin).parents[2]


class ReadyProbe:
    """Asks a gateway's health service; call it until it says True."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target, options=channels.CHANNEL_OPTIONS)
        self._check = self._channel.unary_unary(_HEALTH_CHECK, request_serializer=bytes, response_deserializer=bytes)

    def __call__(self) -> bool:
        """Whether the gateway serves now."""
        try:
            return bool(self._check(b"", timeout=1.0) == _SERVING)
        except grpc.RpcError:
            return False

    def close(self) -> None:
        """Closes its channel."""
        self._channel.close()


def wait_serving(supervisor: Supervisor, target: str, timeout_s: float = READY_TIMEOUT_S) -> None:
    """Blocks until the gateway serves; raises like `Supervisor.wait`."""
    probe = ReadyProbe(target)
    try:
        supervisor.wait_ready(probe, timeout_s)
    finally:
        probe.close()


@contextmanager
def running(
    options: PipelineOptions, *, on_line: OnLine | None = None, timeout_s: float = READY_TIMEOUT_S
) -> Iterator[tuple[Plan, Supervisor]]:
    """A pipeline that serves, for as long as the `with` block lasts; then it is stopped in order.

    Raises:
        PipelineError, ProgramDied, TimeoutError: it does not come up.
    """
    planned = plan(options)
    supervisor = Supervisor(planned.programs, on_line)
    supervisor.start()
    try:
        wait_serving(supervisor, planned.target, timeout_s)
        yield planned, supervisor
    except BaseException:
        supervisor.stop(at_once=True)
        raise
    supervisor.stop(grace_s=5.0)


def _ports(options: PipelineOptions, sources: _Sources, hosts: Mapping[str, str]) -> dict[str, int]:
    """The ports that are named or usual, each free and given once; 0: any."""
    numbers: dict[str, int] = {}
    for name, default in PORTS.items():
        asked = options.ports.get(name)
        numbers[name] = (
            asked
            if asked is not None
            else _port(sources.get(name, "port"), name, 0 if options.free_by_default else default)
        )
    wanted = [number for number in numbers.values() if number]
    twice = {number for number in wanted if wanted.count(number) > 1}
    if twice:
        names = " and ".join(name for name, number in numbers.items() if number in twice)
        raise BadOption(f"port {min(twice)} is given to {names}; each needs its own")
    _check_free({name: (hosts[name], number) for name, number in numbers.items()})
    return numbers


def _metrics_ports(asked: Mapping[str, int], sources: _Sources, hosts: Mapping[str, str]) -> dict[str, int]:
    """Where each process offers its metrics; 0: nowhere."""
    numbers = {}
    for name, number in asked.items():
        beside = number + METRICS_OFFSET if 0 < number <= 65535 - METRICS_OFFSET else 0
        numbers[name] = _port(sources.get(name, "metrics_port"), f"{name}_metrics", beside)
    _check_free({f"metrics of the {name}": (hosts[name], number) for name, number in numbers.items()})
    return numbers


def _check_free(wanted: Mapping[str, tuple[str, int]]) -> None:
    problems = []
    for name, (host, number) in wanted.items():
        problem = ports.check(host, number) if number else ""
        if problem:
            problems.append(f"{name}: {problem}")
    if problems:
        raise PipelineError("; ".join(problems))


def _port(raw: str | None, name: str, default: int) -> int:
    if raw is None:
        return default
    if not raw.isascii() or not raw.isdigit() or int(raw) > 65535:
        raise BadOption(f"HEADRACE_{name.upper()}_PORT={raw!r}: expected a whole number from 0 to 65535")
    return int(raw)


def _reachable(host: str) -> str:
    """The address at which a process that listens on `host` is called from this machine."""
    if host in ("0.0.0.0", "::", "[::]"):  # noqa: S104 - compared, not bound
        return "127.0.0.1"
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
