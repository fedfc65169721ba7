"""Draws spans as a waterfall of text, one line a span. Knows neither receipts nor Jaeger's format.

A bar begins and ends on eighths of a character cell; whatever took any time at all is at least one eighth wide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EIGHTHS = " ▏▎▍▌▋▊▉█"
MIN_BAR_CELLS = 20


@dataclass(frozen=True)
class Bar:
    """One line: when a span began after the first one, and how long it took."""

    name: str
    start_ns: int
    duration_ns: int
    depth: int = 0  # in the tree of spans
    note: str = ""
    failed: bool = False


def render(bars: Sequence[Bar], width: int = 100) -> list[str]:
    """The lines of a waterfall, at most `width` cells where that is enough: name, milliseconds, bar; then a note."""
    if not bars:
        return []
    names = [f"{'  ' * bar.depth}{'✗ ' if bar.failed else ''}{bar.name}" for bar in bars]
    name_width = max(map(len, names))
    origin = min(bar.start_ns for bar in bars)
    span = max(1, max(bar.start_ns + max(0, bar.duration_ns) for bar in bars) - origin)
    cells = max(MIN_BAR_CELLS, width - name_width - 14)
    lines = []
    for name, bar in zip(names, bars, strict=True):
        drawn = _bar(bar.start_ns - origin, bar.duration_ns, span, cells)
        line = f"{name:<{name_width}} {bar.duration_ns / 1e6:>9.2f} ms {drawn}"
        lines.append(f"{line.rstrip()}  {bar.note}" if bar.note else line.rstrip())
    return lines


def _bar(start_ns: int, duration_ns: int, span_ns: int, cells: int) -> str:
    """A bar in `cells` cells that stand for `span_ns`; its start is rounded down to a whole cell."""
    if duration_ns <= 0:
        return ""
    begin = min(cells * 8 - 1, start_ns * cells * 8 // span_ns)
    end = max(begin + 1, min(cells * 8, (start_ns + duration_ns) * cells * 8 // span_ns))
    first = begin // 8
    full, rest = divmod(end - first * 8, 8)
    return " " * first + "█" * full + (EIGHTHS[rest] if rest else "")
