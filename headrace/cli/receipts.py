"""Remembers the receipts of the last answers in the cache, so that `headrace trace` can draw them later.

A receipt is one JSON file: ids, model, token counts, the client's wall time and `StageTimings`. Never a prompt or an
answer. Failing to remember is not an error of the answer: it is told, nothing more.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.answers import Answer
from headrace.cli import stages
from headrace.v1 import generation_pb2, timings_pb2

KEPT = 100


class ReceiptError(Exception):
    """A receipt is not there or cannot be read; the message is one line."""


@dataclass(frozen=True)
class Receipt:
    """A remembered answer."""

    trace_id: str
    request_id: str
    model: str
    asked_at: str  # UTC, ISO 8601
    wall_ns: int  # the client's, around the whole call
    usage: generation_pb2.Usage
    timings: timings_pb2.StageTimings

    @classmethod
    def of(cls, answer: Answer, wall_ns: int) -> Receipt:
        """The receipt of an answer that has just come."""
        asked_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        return cls(answer.trace_id, answer.request_id, answer.model, asked_at, wall_ns, answer.usage, answer.timings)

    def as_json(self) -> dict[str, Any]:
        """Plain values, as the file holds them."""
        return {
            "trace_id": self.trace_id,
            "request_id": self.request_id,
            "model": self.model,
            "asked_at": self.asked_at,
            "wall_ns": self.wall_ns,
            "usage": {field.name: getattr(self.usage, field.name) for field in self.usage.DESCRIPTOR.fields},
            "timings": stages.as_json(self.timings),
        }


def directory() -> Path:
    """Where receipts are kept."""
    from headrace.models import cache_dir

    return cache_dir() / "receipts"


def remember(receipt: Receipt) -> Path:
    """Writes a receipt and forgets all but the last `KEPT`. Raises OSError."""
    place = directory()
    place.mkdir(parents=True, exist_ok=True)
    file = place / f"{time.time_ns():020d}-{receipt.trace_id}.json"
    hidden = file.with_suffix(".part")
    hidden.write_text(json.dumps(receipt.as_json(), indent=1) + "\n", encoding="utf-8")
    hidden.replace(file)
    for old in sorted(place.glob("*.json"))[:-KEPT]:
        with contextlib.suppress(OSError):
            old.unlink()
    return file


def last() -> Receipt:
    """The newest receipt. Raises ReceiptError."""
    files = sorted(directory().glob("*.json"))
    if not files:
        raise ReceiptError("no receipt is remembered yet; ask something first: headrace ask QUESTION")
    return load(files[-1])


def slowest(count: int) -> list[Receipt]:
    """The remembered answers that took longest, slowest first. Raises ReceiptError."""
    found = []
    for file in directory().glob("*.json"):
        with contextlib.suppress(ReceiptError):
            found.append(load(file))
    if not found:
        return [last()]
    return sorted(found, key=lambda receipt: -receipt.timings.total_ns)[:count]


def find(trace_id: str) -> Receipt | None:
    """The receipt of a trace id, or of a request id; None if it is not remembered."""
    for file in sorted(directory().glob("*.json"), reverse=True):
        if file.stem.partition("-")[2] == trace_id:
            return load(file)
    for file in sorted(directory().glob("*.json"), reverse=True):
        with contextlib.suppress(ReceiptError):
            receipt = load(file)
            if receipt.request_id == trace_id:
                return receipt
    return None


def load(file: Path) -> Receipt:
    """Reads a receipt: a remembered one, or what `headrace ask --json` wrote. Raises ReceiptError."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return Receipt(
            trace_id=str(values.get("trace_id", "")),
            request_id=str(values.get("request_id", "")),
            model=str(values.get("model", "")),
            asked_at=str(values.get("asked_at", "")),
            wall_ns=int(values.get("wall_ns", 0)),
            usage=generation_pb2.Usage(**values.get("usage", {})),
            timings=stages.from_json(values["timings"]),
        )
    except OSError as error:
        raise ReceiptError(f"{file}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ReceiptError(f"{file} holds no receipt ({type(error).__name__}: {error})") from error
