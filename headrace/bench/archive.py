"""Every run is kept: its report with fingerprint and intent, and its records. A folder a run, never overwritten."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.bench import records
from headrace.bench.records import Record

REPORT, RECORDS = "run.json", "records.jsonl"
FORMAT = 1


class ArchiveError(Exception):
    """A run is not there or cannot be read or written; the message is one line."""


@dataclass(frozen=True)
class Intent:
    """Why a run was made, in the words of whoever made it, written before it was measured."""

    change: str = ""  # what is different from the run before
    expect: str = ""  # what that should do
    side_effects: str = ""  # what else it could do

    def as_json(self) -> dict[str, str]:
        """By name."""
        return asdict(self)


def directory() -> Path:
    """Where runs are kept unless somebody says otherwise."""
    from headrace.models import cache_dir

    return cache_dir() / "bench"


def save(place: Path, report: Mapping[str, Any], made: Sequence[Record], intent: Intent) -> dict[str, Any]:
    """Keeps a run; returns the report with its `id`. Raises ArchiveError."""
    moment = str(report["started_at"]).partition("+")[0].replace("-", "").replace(":", "")
    name = f"{moment}-{report['load_digest'][:8]}"
    try:
        folder = next(path for path in _candidates(place / name) if _claim(path))
        kept = {"format": FORMAT, "id": folder.name, "intent": intent.as_json(), **report}
        records.write(folder / RECORDS, made)
        (folder / REPORT).write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ArchiveError(f"{place}: a run cannot be kept there ({error.strerror})") from error
    return kept


def load(place: Path, name: str) -> dict[str, Any]:
    """The report of a run.

    Args:
        place: the archive.
        name: an id in it, or the path of a run's folder or of a report.

    Raises:
        ArchiveError: it is not there, or is none.
    """
    for path in (place / name / REPORT, Path(name) / REPORT, Path(name)):
        if path.is_file():
            return _read(path)
    raise ArchiveError(f"run {name!r} is neither in {place} nor a file")


def load_records(place: Path, name: str) -> Sequence[Record]:
    """The records of a run, by id or folder. Raises ArchiveError."""
    for path in (place / name / RECORDS, Path(name) / RECORDS):
        try:
            return records.read(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError) as error:
            raise ArchiveError(f"{path}: holds no records ({error})") from error
    raise ArchiveError(f"run {name!r} has no records in {place}")


def all_runs(place: Path) -> list[dict[str, Any]]:
    """Every report in an archive, oldest first. Raises ArchiveError."""
    return sorted(
        (_read(path) for path in place.glob(f"*/{REPORT}")), key=lambda report: (report["started_at"], report["id"])
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArchiveError(f"{path}: cannot be read ({error})") from error
    if not isinstance(report, dict) or not {"id", "fingerprint", "legs", "started_at"} <= report.keys():
        raise ArchiveError(f"{path}: is no report of a run")
    if report.get("format") != FORMAT:
        raise ArchiveError(f"{path}: format {report.get('format')!r}; this version reads {FORMAT}")
    return report


def _candidates(path: Path) -> list[Path]:
    return [path, *(path.with_name(f"{path.name}-{number}") for number in range(2, 1000))]


def _claim(path: Path) -> bool:
    """Makes the folder; False where there is one."""
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return False
    return True
