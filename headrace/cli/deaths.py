"""How and why a program ended, from its exit code and what it wrote. Knows the two log formats, and no process."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

_CANNOT_GO_ON = re.compile(r"cannot go on\b.*?\breason=(?P<reason>.*?)(?:\s+service=\S+)?$")


@dataclass(frozen=True)
class Death:
    """How a program ended although nobody asked it to."""

    name: str
    exit_code: int  # negative: minus the signal's number
    reason: str  # its own words, "" if it gave none
    last_line: str = ""  # the last that it wrote

    def __str__(self) -> str:
        """One line: who, how and why."""
        told = f"{self.name} ended ({self._how()})"
        if self.reason:
            return f"{told}: {self.reason}"
        return f"{told}; its last line: {self.last_line}" if self.last_line else told

    def _how(self) -> str:
        if self.exit_code >= 0:
            return f"exit code {self.exit_code}"
        try:
            return f"killed by {signal.Signals(-self.exit_code).name}"
        except ValueError:
            return f"killed by signal {-self.exit_code}"


def reason_of(name: str, lines: Sequence[str]) -> str:
    """Why a process says that it ended: its "cannot go on", else its bad settings, else ""."""
    for line in reversed(lines):
        if "cannot go on" in line:
            return _reason_in(line)
    prefix = f"headrace {name}: "
    problems = [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]
    return "; ".join(problems)


def _reason_in(line: str) -> str:
    """The reason in a log line of either format."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(json.loads(line)["reason"])
    match = _CANNOT_GO_ON.search(line)
    return match["reason"].strip("'\"") if match else line
