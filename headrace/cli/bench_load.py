"""The options that say which load is made and whom it meets; shared by `bench run` and `bench sweep`."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli import output, pipeline, ports, up

if TYPE_CHECKING:
    from headrace.bench.execute import Measuring, Server
    from headrace.bench.load.spec import Leg, LoadSpec

DEFAULT_SECONDS = 30.0


def needs_numpy() -> None:
    """Raises CommandError where the workbench's one dependency is not here."""
    if importlib.util.find_spec("numpy") is None:
        raise output.CommandError("numpy is needed: pip install 'headrace[bench]'")


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the requests."""
    load = parser.add_argument_group("requests")
    load.add_argument(
        "--arrivals", default="poisson", metavar="PROCESS", help="poisson, constant, gamma:CV (%(default)s)"
    )
    load.add_argument(
        "--prompt",
        default="128",
        metavar="LENGTHS",
        help="tokens: 64, 32-128, 70:32-128,30:256-512, "
        "lognormal:MEDIAN,SIGMA,LOW-HIGH, zipf:EXPONENT,LOW-HIGH, cdf:FILE (%(default)s)",
    )
    load.add_argument("--output", default="64", metavar="LENGTHS", help="tokens of an answer, alike (%(default)s)")
    load.add_argument("--correlation", type=float, default=0.0, metavar="R", help="of both lengths, -1 to 1 (0)")
    load.add_argument("--shared-prefix", default="0", metavar="TOKENS[:GROUPS]", help="first tokens that are the same")
    load.add_argument("--turns", type=output.positive, default=1, metavar="N", help="of a conversation (%(default)s)")
    load.add_argument("--think", type=output.seconds, metavar="SECONDS", help="from an answer to the next turn (0)")
    load.add_argument("--cancel", type=float, default=0.0, metavar="SHARE", help="of requests whose reader leaves (0)")
    load.add_argument("--slow-readers", default="0", metavar="SHARE[:SECONDS]", help="that pause after each message")
    load.add_argument("--priorities", metavar="NAME:WEIGHT,...", help="interactive, standard, batch")
    load.add_argument("--tenants", type=Path, metavar="FILE", help="lines: name, API key, weight")
    load.add_argument(
        "--seed", type=output.whole, default=0, metavar="N", help="the same seed makes the same requests (0)"
    )


def add_measuring_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the server and of the measuring."""
    where = parser.add_argument_group("server")
    where.add_argument("--target", metavar="HOST:PORT", help="gateway (default: a pipeline started for the run)")
    where.add_argument(
        "--metrics", nargs="+", default=[], metavar="HOST:PORT", help="Prometheus endpoints of the target"
    )
    how = parser.add_argument_group("measuring")
    how.add_argument("--slo", metavar="OBJECTIVES", help="ttft=500ms,tpot=50ms,e2e=10s: what goodput counts")
    how.add_argument("--processes", type=output.positive, default=1, metavar="N", help="client processes (%(default)s)")
    how.add_argument(
        "--timeout", type=output.seconds, default=120.0, metavar="SECONDS", help="of a request (%(default)s)"
    )
    how.add_argument(
        "--min-requests",
        type=output.positive,
        default=100,
        metavar="N",
        help="measured, or the run is INVALID (%(default)s)",
    )
    how.add_argument("--archive", type=Path, metavar="DIR", help="where runs are kept (default: in the cache)")
    up.add_engine_options(parser)


def spec_of(arguments: argparse.Namespace, loop: str, legs: tuple[Leg, ...], replay: str | None = None) -> LoadSpec:
    """The load that the options ask for. Raises CommandError."""
    from headrace.bench.load.lengths import BadLoad
    from headrace.bench.load.spec import LoadSpec, weights

    try:
        prefix, _, groups = arguments.shared_prefix.partition(":")
        slow, _, pause = arguments.slow_readers.partition(":")
        return LoadSpec(
            loop=loop,  # type: ignore[arg-type]
            legs=legs,
            seed=arguments.seed,
            arrivals=arguments.arrivals,
            prompt=arguments.prompt,
            output=arguments.output,
            correlation=arguments.correlation,
            replay=replay,
            replay_speed=getattr(arguments, "speed", None) or 1.0,
            shared_prefix=_whole(prefix, "--shared-prefix"),
            prefix_groups=_whole(groups or "1", "--shared-prefix"),
            turns=arguments.turns,
            think_s=arguments.think or 0.0,
            cancel_share=arguments.cancel,
            slow_share=_number(slow, "--slow-readers"),
            slow_pause_s=_number(pause or "0.5", "--slow-readers"),
            priorities=weights(arguments.priorities, "--priorities") if arguments.priorities else {},
            tenants={name: weight for name, (_, weight) in _tenants(arguments.tenants).items()},
        )
    except BadLoad as error:
        raise output.CommandError(str(error), output.BAD_USAGE) from error


def load_text(load: Mapping[str, Any]) -> str:
    """A load in words: its level, its lengths, and whatever else is not usual."""
    from headrace.bench.load.spec import LoadSpec

    usual = {field.name: field.default for field in fields(LoadSpec)}
    told = {"loop", "legs", "seed", "replay", *(() if load["replay"] else ("prompt", "output"))}
    levels = ", ".join(f"{leg['level']:g}" for leg in load["legs"])
    first = f"replay {load['replay'][:8]}" if load["replay"] else f"{load['loop']} loop at {levels}"
    lengths = () if load["replay"] else (f"prompt {load['prompt']}", f"output {load['output']}")
    more = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in load.items()
        if name not in told and value and value != usual[name]
    ]
    return ", ".join((first, *lengths, *more))


def measuring_of(arguments: argparse.Namespace) -> Measuring:
    """How it is measured. Raises CommandError."""
    from headrace.bench.execute import Measuring
    from headrace.bench.metrics import Slo, parse_slo

    try:
        slo = parse_slo(arguments.slo) if arguments.slo else Slo()
    except ValueError as error:
        raise output.CommandError(str(error), output.BAD_USAGE) from error
    return Measuring(slo, arguments.processes, arguments.min_requests)


@contextmanager
def server(arguments: argparse.Namespace, variables: dict[str, str] | None = None) -> Iterator[Server]:
    """The server that is meant: the one named, or a pipeline for as long as the block lasts.

    Args:
        arguments: the options.
        variables: settings of the pipeline beside those of the options.

    Raises:
        CommandError, ProgramDied, TimeoutError: it does not come up.
    """
    from headrace.bench.execute import Server
    from headrace.bench.load.workers import Where

    keys = {name: key for name, (key, _) in _tenants(arguments.tenants).items()}
    if arguments.target:
        yield Server(Where(arguments.target, keys, arguments.timeout), metrics=arguments.metrics)
        return
    settings = {**up.variables_of(arguments), **(variables or {})}
    numbers = ports.free("127.0.0.1", len(pipeline.PORTS))
    offered = dict(zip(pipeline.PORTS, numbers, strict=True))
    own = {f"HEADRACE_{name.upper()}_METRICS_PORT": str(number) for name, number in offered.items()}
    options = pipeline.PipelineOptions({**settings, **own}, ports=dict.fromkeys(pipeline.PORTS, 0))
    up.prepare(options)
    with pipeline.running(options) as (planned, supervisor):
        metrics = [f"127.0.0.1:{number}" for number in numbers]
        yield Server(Where(planned.target, keys, arguments.timeout), settings, dict(supervisor.pids), metrics)


def _tenants(path: Path | None) -> dict[str, tuple[str, float]]:
    """API key and weight of each tenant. Raises CommandError."""
    if path is None:
        return {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise output.CommandError(f"--tenants {path}: {error.strerror}", output.BAD_USAGE) from error
    found = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, *rest = (part.strip() for part in line.split(","))
        if len(rest) not in (1, 2):
            where = f"--tenants {path}: line {number}"
            raise output.CommandError(f"{where}: expected name, key and perhaps weight", output.BAD_USAGE)
        found[name] = (rest[0], _number(rest[1], f"--tenants {path}: weight") if len(rest) > 1 else 1.0)
    return found


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise output.CommandError(f"{name} {text!r}: expected a number, 0 or more", output.BAD_USAGE)
    return value


def _whole(text: str, name: str) -> int:
    value = _number(text, name)
    if value != int(value):
        raise output.CommandError(f"{name} {text!r}: expected a whole number", output.BAD_USAGE)
    return int(value)
