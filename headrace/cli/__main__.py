"""The `headrace` command: finds the subcommand, runs it, turns what it raises into an exit code."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from headrace.cli import ask, bench, dashboard, model, output, stats, trace, up
from headrace.cli.pipeline import PipelineError

_SUBCOMMANDS = (up, ask, stats, trace, dashboard, model, bench)


def build_parser() -> argparse.ArgumentParser:
    """The parser of everything."""
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="A gRPC pipeline for LLM inference: start it, ask it, see where the time goes.",
        epilog=output.EXIT_CODES,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for subcommand in _SUBCOMMANDS:
        subcommand.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (see `output.EXIT_CODES`)."""
    try:
        arguments = build_parser().parse_args(argv)
    except SystemExit as end:  # argparse has said why
        return end.code if isinstance(end.code, int) else output.BAD_USAGE
    try:
        return int(arguments.run(arguments))
    except output.CommandError as error:
        _complain(str(error))
        return error.code
    except PipelineError as error:
        _complain(str(error))
        return output.FAILED
    except KeyboardInterrupt:
        _complain("interrupted")
        return output.INTERRUPTED
    except BrokenPipeError:  # whoever read our output has enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return output.FAILED


def _complain(message: str) -> None:
    output.stderr().print(f"headrace: {message}", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
