"""A receipt as stages: which follow one another, what they add up to, and what they say beside.

Knows `StageTimings` and nothing of how it came here. All durations are integer nanoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.table import Table

from headrace.v1 import generation_pb2, timings_pb2

NS_PER_MS = 1e6

# Up to the first token, in the order in which they happen; see timings.proto.
FIRST_TOKEN_STAGES = {
    "admit": "validation and the admission queue",
    "tokenize": "waiting, rendering, encoding",
    "route": "choosing an engine",
    "transit": "between processes",
    "queue": "in the engine's queue",
    "prefill": "computing the prompt",
    "first_delivery": "first token to the connection",
}
LATER_STAGES = {
    "decode": "first to last token",
    "decode_delivery": "the last token's way, beyond the first one's",
    "tail": "last token to the final message",
    "residual": "what no stage explains",
}


@dataclass(frozen=True)
class Stage:
    """One stage of a receipt."""

    name: str
    duration_ns: int
    meaning: str


def first_token_stages(timings: timings_pb2.StageTimings) -> list[Stage]:
    """The stages whose durations add up to the time to the first token (but for the first part of residual)."""
    return _stages(timings, FIRST_TOKEN_STAGES)


def all_stages(timings: timings_pb2.StageTimings) -> list[Stage]:
    """The stages whose durations add up to the total."""
    return [*first_token_stages(timings), *_stages(timings, LATER_STAGES)]


def table(
    timings: timings_pb2.StageTimings, usage: generation_pb2.Usage | None = None, wall_ns: int | None = None
) -> Table:
    """The stage table: milliseconds and share of the total.

    Args:
        timings: the receipt.
        usage: tokens, for the rate.
        wall_ns: what the client measured around the whole call, if it did.
    """
    drawn = Table(title="where the time went", title_justify="left", box=None, pad_edge=False)
    drawn.add_column("stage")
    drawn.add_column("ms", justify="right")
    drawn.add_column("share", justify="right")
    drawn.add_column("", style="dim")
    total = max(1, timings.total_ns)
    for stage in first_token_stages(timings):
        drawn.add_row(*_row(stage.name.replace("_", " "), stage.duration_ns, total), _detail(stage, timings))
    first = timings.time_to_first_token_ns
    drawn.add_row(*_row("= first token", first, total), "time to first token", style="bold", end_section=True)
    for stage in _stages(timings, LATER_STAGES):
        drawn.add_row(*_row(stage.name.replace("_", " "), stage.duration_ns, total), _detail(stage, timings))
    drawn.add_row(*_row("= total", timings.total_ns, total), _rate(timings, usage), style="bold")
    if wall_ns is not None:
        drawn.add_row(*_row("client", wall_ns - timings.total_ns, total), "the client itself and its connection")
        drawn.add_row(*_row("= wall", wall_ns, total), "measured by the client around the call", style="bold")
    return drawn


def as_json(timings: timings_pb2.StageTimings) -> dict[str, int | str]:
    """Every field of the receipt by its name in the contract; enums by name."""
    values: dict[str, int | str] = {}
    for field in timings.DESCRIPTOR.fields:
        value = getattr(timings, field.name)
        values[field.name] = field.enum_type.values_by_number[value].name if field.enum_type else value
    return values


def from_json(values: Mapping[str, object]) -> timings_pb2.StageTimings:
    """The receipt that `as_json` wrote; names of a newer version are left out.

    Raises:
        ValueError, TypeError: a value that the receipt cannot hold.
    """
    known = {field.name for field in timings_pb2.StageTimings.DESCRIPTOR.fields}
    chosen = {name: value for name, value in values.items() if name in known}
    return timings_pb2.StageTimings(**chosen)  # type: ignore[arg-type]


def _stages(timings: timings_pb2.StageTimings, names: Mapping[str, str]) -> list[Stage]:
    return [Stage(name, getattr(timings, f"{name}_ns"), meaning) for name, meaning in names.items()]


def _row(name: str, duration_ns: int, total_ns: int) -> tuple[str, str, str]:
    return name, f"{duration_ns / NS_PER_MS:.2f}", f"{100 * duration_ns / total_ns:.1f} %"


def _detail(stage: Stage, timings: timings_pb2.StageTimings) -> str:
    """What the receipt says of a stage beside its duration, else what the stage is."""
    if stage.name == "tokenize":
        return f"waiting {_ms(timings.tokenize_wait_ns)}, encoding {_ms(timings.tokenize_encode_ns)}"
    if stage.name == "queue" and timings.queue_reason:
        reason = timings_pb2.QueueReason.Name(timings.queue_reason).removeprefix("QUEUE_REASON_").lower()
        return f"waited for {reason}"
    if stage.name == "prefill":
        return (
            f"{timings.computed_token_count} tokens computed, {timings.cached_token_count} cached, "
            f"{timings.prefill_chunk_count} chunks"
        )
    if stage.name == "decode" and timings.decode_step_count:
        return _decode_detail(timings)
    return stage.meaning


def _decode_detail(timings: timings_pb2.StageTimings) -> str:
    parts = [
        f"{timings.decode_step_count} steps",
        f"between tokens p50 {_ms(timings.inter_token_p50_ns)}, p99 {_ms(timings.inter_token_p99_ns)}",
    ]
    if timings.drafted_token_count:
        parts.append(f"{timings.accepted_token_count} of {timings.drafted_token_count} guesses right")
    if timings.stalled_ns:
        parts.append(f"stalled by prefill {_ms(timings.stalled_ns)}")
    if timings.paused_ns:
        parts.append(f"paused by the reader {_ms(timings.paused_ns)}")
    if timings.preemption_count:
        parts.append(f"preempted {timings.preemption_count} times, {_ms(timings.preempted_ns)}")
    return "; ".join(parts)


def _rate(timings: timings_pb2.StageTimings, usage: generation_pb2.Usage | None) -> str:
    if usage is None:
        return ""
    text = f"{usage.prompt_token_count} prompt tokens, {usage.completion_token_count} generated"
    if usage.completion_token_count > 1 and timings.decode_ns > 0:
        text += f", {(usage.completion_token_count - 1) / timings.decode_ns * 1e9:.1f} tokens/s in decode"
    return text


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / NS_PER_MS:.2f} ms"
