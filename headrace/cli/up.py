"""`headrace up`: the four processes of a pipeline on this machine, from start to stop.

One dies: the others are stopped, the command says which and why, and ends with 1. SIGINT or SIGTERM: they are stopped
in order (gateway, stream, engine, tokenizer), and the command ends with 0; a second signal forces. With `--ask` they
are stopped at once, and the command ends with 130.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

from headrace.cli import output, pipeline
from headrace.cli.ask import ask
from headrace.cli.model import fetch
from headrace.cli.supervisor import ProgramDied, StopAsked, Supervisor

_COLOURS = {"gateway": "36", "stream": "35", "engine": "32", "tokenizer": "33"}
_SHOWN_ON_FAILURE = 8  # last log lines, where the log was not shown

# Flag -> (environment variable, help). Each may be given by environment or file instead.
_ENGINE_FLAGS = {
    "--model": ("HEADRACE_MODEL", "stored name or directory of the model"),
    "--dtype": ("HEADRACE_ENGINE_DTYPE", "number format of weights and KV cache: auto, float32, bfloat16"),
    "--quantization": ("HEADRACE_ENGINE_QUANTIZATION", "int8: weights and activations as bytes; none"),
    "--kv-cache-dtype": ("HEADRACE_ENGINE_KV_CACHE_DTYPE", "int8: keys and values as bytes, twice as many fit; auto"),
    "--kv-blocks": ("HEADRACE_ENGINE_KV_BLOCKS", "blocks of the KV pool (default: from free memory)"),
    "--block-size": ("HEADRACE_ENGINE_BLOCK_SIZE", "tokens in a KV block: 8, 16, 32"),
    "--tensor-parallel": ("HEADRACE_ENGINE_TENSOR_PARALLEL", "GPUs, a process each, that share the model"),
    "--max-num-seqs": ("HEADRACE_ENGINE_MAX_NUM_SEQS", "most sequences in one step"),
    "--max-num-batched-tokens": ("HEADRACE_ENGINE_MAX_NUM_BATCHED_TOKENS", "most tokens in one step"),
    "--num-speculative-tokens": (
        "HEADRACE_ENGINE_NUM_SPECULATIVE_TOKENS",
        "most guessed tokens computed of one request in one step; 0: no speculation",
    ),
    "--async-scheduling": (
        "HEADRACE_ENGINE_ASYNC_SCHEDULING",
        "plan a step while the last one is computed: auto, on, off",
    ),
    "--max-model-len": ("HEADRACE_ENGINE_MAX_MODEL_LEN", "context in tokens (default: the model's own)"),
    "--threads": ("HEADRACE_ENGINE_THREADS", "threads of one tensor operation (default: one a core)"),
}
_OTHER_FLAGS = {
    "--trace-endpoint": ("HEADRACE_TRACE_ENDPOINT", "OTLP gRPC endpoint for spans, http://host:port"),
    "--log-level": ("HEADRACE_LOG_LEVEL", "debug, info, warning, error"),
}


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "up",
        help="start gateway, tokenizer, stream and engine here",
        description="Starts the four processes, waits until the gateway serves, and stays until it is stopped. The "
        "default model is fetched first if it is not here. A flag wins over its environment variable, that over the "
        "file that HEADRACE_CONFIG names; every other setting of the services works by environment and file too.",
        epilog=output.EXIT_CODES + "; stopped by a signal: 0",
    )
    add_engine_options(parser)
    _add_pipeline_options(parser)
    parser.add_argument("--ask", metavar="QUESTION", help="ask this once on free ports, greedily, then stop")
    parser.add_argument("--quiet", action="store_true", help="show no logs (with --ask: the default)")
    parser.add_argument("--verbose", action="store_true", help="with --ask: show the logs")
    output.add_json_option(parser)
    parser.set_defaults(run=run)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that become settings of the engine."""
    engine = parser.add_argument_group("engine")
    for flag, (variable, text) in _ENGINE_FLAGS.items():
        engine.add_argument(flag, metavar="VALUE", help=f"{text} [{variable}]")


def _add_pipeline_options(parser: argparse.ArgumentParser) -> None:
    network = parser.add_argument_group("network (port 0: a free one)")
    network.add_argument("--bind", metavar="HOST", help="address of the gateway [HEADRACE_GATEWAY_HOST, 127.0.0.1]")
    for name, default in sorted(pipeline.PORTS.items(), key=lambda item: item[1]):
        flag = "--port" if name == "gateway" else f"--{name}-port"
        variable = f"HEADRACE_{name.upper()}_PORT"
        network.add_argument(flag, type=output.port, metavar="PORT", help=f"of the {name} [{variable}, {default}]")
    other = parser.add_argument_group("telemetry")
    for flag, (variable, text) in _OTHER_FLAGS.items():
        other.add_argument(flag, metavar="VALUE", help=f"{text} [{variable}]")


def variables_of(arguments: argparse.Namespace) -> dict[str, str]:
    """The environment variables that the flags stand for, where they were given."""
    given = {
        variable: getattr(arguments, flag.lstrip("-").replace("-", "_"), None)
        for flag, (variable, _) in {**_ENGINE_FLAGS, **_OTHER_FLAGS}.items()
    }
    return {variable: value for variable, value in given.items() if value is not None}


def options_of(arguments: argparse.Namespace) -> pipeline.PipelineOptions:
    """What the flags ask for."""
    numbers = {name: getattr(arguments, "port" if name == "gateway" else f"{name}_port") for name in pipeline.PORTS}
    return pipeline.PipelineOptions(
        variables=variables_of(arguments),
        ports={name: number for name, number in numbers.items() if number is not None},
        bind=arguments.bind,
        free_by_default=bool(arguments.ask),
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs it; raises CommandError."""
    if not arguments.ask and (arguments.json or arguments.verbose):
        raise output.CommandError("--json and --verbose go with --ask", output.BAD_USAGE)
    planned = prepare(options_of(arguments))
    shown = arguments.verbose if arguments.ask else not arguments.quiet
    supervisor = Supervisor(planned.programs, LogPrinter() if shown else None)
    with _signals(supervisor):
        try:
            begun = time.monotonic()
            supervisor.start()
            return _serve(arguments, planned, supervisor, begun)
        except StopAsked:
            if arguments.ask:  # nobody else is served, and the answer can be long
                supervisor.stop(at_once=True)
                _say("stopped before the answer was whole")
                return output.INTERRUPTED
            _say("stopping; once more to force")
            supervisor.stop()
            _say("stopped")
            return output.OK
        except (ProgramDied, TimeoutError) as error:
            supervisor.stop(at_once=True)
            raise _why(error, supervisor, shown) from error
        except BaseException:
            supervisor.stop(at_once=True)
            raise


def prepare(options: pipeline.PipelineOptions) -> pipeline.Plan:
    """The plan, with its model on this machine. Raises CommandError."""
    try:
        planned = pipeline.plan(options)
    except pipeline.BadOption as error:
        raise output.CommandError(str(error), output.BAD_USAGE) from error
    except pipeline.PipelineError as error:
        raise output.CommandError(str(error)) from error
    ensure_model(planned.model)
    return planned


def ensure_model(model: str | None) -> None:
    """Fetches the default model if it is the one that is wanted and missing. Raises CommandError."""
    from headrace.models import DEFAULT_MODEL, ModelError, ModelNotFound, resolve

    try:
        resolve(model or DEFAULT_MODEL)
    except ModelNotFound as error:
        if (model or DEFAULT_MODEL) != DEFAULT_MODEL:
            raise output.CommandError(str(error), output.BAD_USAGE) from error
        fetch(None)
    except ModelError as error:
        raise output.CommandError(str(error)) from error


class LogPrinter:
    """Prints what the processes write, each line behind its process' name; colours on a terminal alone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._width = max(map(len, pipeline.PORTS))
        self._colour = output.stderr().is_terminal and not output.stderr().no_color

    def __call__(self, name: str, line: str) -> None:
        """Prints one line; called from several threads."""
        prefix = f"{name:<{self._width}} |"
        if self._colour:
            prefix = f"\x1b[{_COLOURS.get(name, '0')}m{prefix}\x1b[0m"
        with self._lock, contextlib.suppress(OSError, ValueError):  # nobody reads: the processes must not block on it
            sys.stderr.write(f"{prefix} {output.printable(line)}\n")
            sys.stderr.flush()


def _serve(arguments: argparse.Namespace, planned: pipeline.Plan, supervisor: Supervisor, begun: float) -> int:
    """From the start to the end that somebody asks for. Raises like `Supervisor.wait`, and CommandError."""
    if arguments.ask:
        _say(f"starting {', '.join(planned.addresses)}")
    pipeline.wait_serving(supervisor, planned.target)
    ready = f"ready on {planned.target} after {time.monotonic() - begun:.1f} s"
    if not arguments.ask:
        output.stdout().print(ready, soft_wrap=True)
        supervisor.wait()
        return output.OK
    _say(ready)
    options = {"messages": [("user", arguments.ask)], "temperature": 0.0, "priority": "interactive"}
    asking = ThreadPoolExecutor(1).submit(ask, planned.target, options, output.stdout(json_target=arguments.json))
    supervisor.wait_ready(asking.done, math.inf)  # not `result`, which a signal does not end
    report = asking.result()
    supervisor.stop(grace_s=5.0)
    output.write_json(arguments.json, report)
    return output.OK


@contextlib.contextmanager
def _signals(supervisor: Supervisor) -> Iterator[None]:
    """SIGINT and SIGTERM ask the supervisor to stop; a second one forces it."""

    def ask_to_stop(_number: int, _frame: FrameType | None) -> None:
        supervisor.ask_to_stop()

    before = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _why(error: Exception, supervisor: Supervisor, shown: bool) -> output.CommandError:
    if not isinstance(error, ProgramDied):
        return output.CommandError(f"the pipeline is {error}")
    if not shown:
        for line in supervisor.lines(error.death.name)[-_SHOWN_ON_FAILURE:]:
            LogPrinter()(error.death.name, line)
    return output.CommandError(f"{error}; the others were stopped")


def _say(text: str) -> None:
    output.stderr().print(text, soft_wrap=True)
