"""Logs of real traffic to replay: when requests came and how long they were. Knows no request.

Three kinds, told apart by their first line: JSON lines with `at_s`, `prompt_tokens` and `output_tokens`; the CSV of the
Azure LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens); that of BurstGPT (Timestamp, ..., Request
tokens, Response tokens). Entries without tokens, which both have, are left out.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headrace.bench.load.lengths import BadLoad

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Entry:
    """One request of a log."""

    at_s: float  # after the first one
    prompt_tokens: int
    output_tokens: int


_KINDS: Mapping[str, tuple[str, str, str]] = {
    "at_s": ("at_s", "prompt_tokens", "output_tokens"),
    "TIMESTAMP": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "Timestamp": ("Timestamp", "Request tokens", "Response tokens"),
}


def read(path: Path, speed: float = 1.0) -> list[Entry]:
    """The entries of a log in the order of time.

    Args:
        path: the file.
        speed: gaps are divided by this: 2 is twice as fast.

    Raises:
        BadLoad: it cannot be read; the message names file and line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadLoad(f"--replay {path}: cannot be read ({error})") from error
    lines = text.splitlines()
    rows: Iterable[Row] = map(json.loads, filter(str.strip, lines)) if text.startswith("{") else csv.DictReader(lines)
    entries: list[Entry] = []
    number = 0
    try:
        for number, row in enumerate(rows, 1):  # noqa: B007 - named in the error
            time, prompt, output = _columns(row)
            entry = Entry(_seconds(row[time]), int(row[prompt]), int(row[output]))
            if entry.prompt_tokens > 0 and entry.output_tokens > 0:
                entries.append(entry)
    except (ValueError, KeyError, TypeError) as error:
        raise BadLoad(f"--replay {path}: entry {number}: {error}") from error
    if not entries:
        raise BadLoad(f"--replay {path}: no request in it")
    entries.sort(key=lambda entry: entry.at_s)
    first_s = entries[0].at_s
    return [Entry((entry.at_s - first_s) / speed, entry.prompt_tokens, entry.output_tokens) for entry in entries]


def _columns(row: Row) -> tuple[str, str, str]:
    for name, columns in _KINDS.items():
        if name in row:
            return columns
    raise ValueError(f"expected one of {', '.join(_KINDS)} among {', '.join(map(str, row))}")


def _seconds(value: Any) -> float:
    """Seconds of a number, or of a date and time."""
    for convert in (float, _date):
        try:
            return convert(value)
        except ValueError:
            continue
    raise ValueError(f"{value!r} is no time")


def _date(value: str) -> float:
    at = datetime.fromisoformat(value)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
