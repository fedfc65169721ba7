"""What every subcommand shares: exit codes, one-line errors, JSON reports, consoles. Knows no subcommand."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

OK = 0
FAILED = 1
BAD_USAGE = 2  # also: what was named is not there
INTERRUPTED = 130  # as a shell says of a program that Ctrl-C ended

EXIT_CODES = "exit codes: 0 done; 1 failed; 2 bad usage, or what was named is not there; 130 interrupted"


class CommandError(Exception):
    """Ends a command with one line on standard error.

    Args:
        message: the line.
        code: the exit code.
    """

    def __init__(self, message: str, code: int = FAILED) -> None:
        self.code = code
        super().__init__(message)


def add_json_option(parser: argparse._ActionsContainer) -> None:
    """Adds `--json FILE`."""
    parser.add_argument(
        "--json", metavar="FILE", help="also write the report (up: of --ask) as JSON to FILE (-: standard output)"
    )


def add_target_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--target` and `--timeout`."""
    parser.add_argument("--target", default="127.0.0.1:50050", metavar="HOST:PORT", help="gateway (%(default)s)")
    parser.add_argument("--timeout", type=seconds, metavar="SECONDS", help="give up after this long (default: never)")


def seconds(text: str) -> float:
    """An argument that is a positive number of seconds. Raises ArgumentTypeError."""
    return _above_zero(text, "a positive number of seconds")


def positive_number(text: str) -> float:
    """An argument that is a positive number. Raises ArgumentTypeError."""
    return _above_zero(text, "a positive number")


def positive(text: str) -> int:
    """An argument that is a whole number of at least 1. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least 1")
    return int(text)


def whole(text: str) -> int:
    """An argument that is a whole number, 0 included. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, 0 or more")
    return int(text)


def port(text: str) -> int:
    """An argument that is a port; 0: a free one. Raises ArgumentTypeError."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a port, 0 to 65535")
    return int(text)


def stdout(*, json_target: str | None = None) -> Console:
    """The console for people; standard error where the JSON goes to standard output."""
    return Console(stderr=json_target == "-", highlight=False, markup=False, emoji=False)


def stderr() -> Console:
    """The console for progress and errors."""
    return Console(stderr=True, highlight=False, markup=False, emoji=False)


def write_json(target: str | None, report: Any) -> None:
    """Writes a report where `--json` says. Raises CommandError."""
    if target is None:
        return
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--json {target}: cannot be written ({error.strerror})", BAD_USAGE) from error


def expect_writable(option: str, target: str | Path | None) -> None:
    """Complains before the work of minutes, not after it, that its file cannot be written. Raises CommandError."""
    if target is None or str(target) == "-":
        return
    folder = Path(target).absolute().parent
    if not folder.is_dir() or Path(target).is_dir():
        raise CommandError(f"{option} {target}: cannot be written (no such folder, or it is one)", BAD_USAGE)
    if not os.access(folder, os.W_OK):
        raise CommandError(f"{option} {target}: cannot be written (permission denied)", BAD_USAGE)


@contextmanager
def progress() -> Iterator[Any]:
    """A progress line on standard error, as a function of (what is happening, share done or None)."""
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task("", total=None)
        said = ""

        def show(text: str, share: float | None) -> None:
            nonlocal said
            if text != said and not bar.console.is_terminal:
                bar.console.print(text)  # no live line in a log: each stage once
            said = text
            bar.update(task, description=text, total=None if share is None else 1.0, completed=share or 0.0)

        yield show


def _above_zero(text: str, expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected {expected}")
    return value


def printable(text: str) -> str:
    """Text without control characters that could steer a terminal; line breaks and tabs stay."""
    return "".join(c if c in "\n\t" or (ord(c) >= 32 and not 0x7F <= ord(c) < 0xA0) else "\ufffd" for c in text)
