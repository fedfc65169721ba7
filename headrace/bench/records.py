"""One request as its client saw it: the raw material of every figure. Knows no transport.

Times are seconds after the start of the run, on the machine's monotonic clock, which all client processes share.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

OK = "ok"
CANCELLED = "cancelled"  # by the load, as planned


@dataclass(slots=True)
class Record:
    """One request, made or still under way.

    `messages` are those with tokens: when each came, and how many tokens it held. `output_tokens` is what the server's
    usage says; of a request that was cancelled or failed, what came.
    """

    conversation: int
    turn: int = 0
    leg: int = 0
    client: int = 0  # process
    priority: str | None = None
    tenant: str | None = None
    slow_reader: bool = False
    planned_output: int = 0
    intended_s: float = 0.0  # when it should have been sent
    sent_s: float = 0.0  # when it was
    ended_s: float = 0.0  # final message, cancel or error
    messages: list[tuple[float, int]] = field(default_factory=list)
    outcome: str = ""  # OK, CANCELLED, or the name of the error
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    request_id: str = ""
    trace_id: str = ""
    receipt: dict[str, int | str] = field(default_factory=dict)  # StageTimings by name; nanoseconds

    @property
    def first_s(self) -> float:
        """When the first token came; nan where none did."""
        return self.messages[0][0] if self.messages else float("nan")

    @property
    def last_s(self) -> float:
        """When the last token came; nan where none did."""
        return self.messages[-1][0] if self.messages else float("nan")

    @property
    def ttft_s(self) -> float:
        """From when it was due to its first token; nan where none came."""
        return self.first_s - self.intended_s

    @property
    def e2e_s(self) -> float:
        """From when it was due to its end."""
        return self.ended_s - self.intended_s

    @property
    def received_tokens(self) -> int:
        """Tokens in the messages."""
        return sum(count for _, count in self.messages)

    @property
    def miscounted(self) -> bool:
        """Whether the server's usage, the messages and the plan disagree."""
        return self.outcome == OK and not self.output_tokens == self.received_tokens == self.planned_output

    def as_json(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self)


_FIELDS = {one.name for one in fields(Record)}


def from_json(values: dict[str, Any]) -> Record:
    """The record that `as_json` gave; fields of a newer version are left out. Raises TypeError."""
    known = {name: value for name, value in values.items() if name in _FIELDS}
    known["messages"] = [(float(at), int(count)) for at, count in known.get("messages", ())]
    return Record(**known)


def write(path: Path, records: Iterable[Record]) -> None:
    """Writes them as JSON lines. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record.as_json(), ensure_ascii=False, separators=(",", ":")) + "\n")


def read(path: Path) -> Sequence[Record]:
    """Reads what `write` wrote. Raises OSError, ValueError, TypeError."""
    with path.open(encoding="utf-8") as file:
        return [from_json(json.loads(line)) for line in file if line.strip()]
