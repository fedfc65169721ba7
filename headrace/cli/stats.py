"""`headrace stats`: what each engine is doing now."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from headrace import errors
from headrace.cli import output
from headrace.cli.ask import failure
from headrace.sync_client import Client
from headrace.v1 import engine_pb2, gateway_pb2

DEFAULT_TIMEOUT_S = 10.0


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "stats",
        help="what each engine is doing now",
        description="One column an engine: sequences, KV blocks, totals since its start.",
        epilog=output.EXIT_CODES,
    )
    output.add_target_option(parser)
    output.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it; raises CommandError."""
    try:
        with Client(arguments.target) as client:
            answer = client.get_stats(timeout=arguments.timeout or DEFAULT_TIMEOUT_S)
    except errors.HeadraceError as error:
        raise failure(error) from error
    output.stdout(json_target=arguments.json).print(table(answer))
    output.write_json(arguments.json, as_json(answer))
    return output.OK


def as_json(answer: gateway_pb2.GetStatsResponse) -> dict[str, Any]:
    """Every number by its name in the contract."""
    engines = [
        {
            "address": engine.address,
            "reachable": engine.reachable,
            "model": engine.model,
            "dtype": engine.dtype,
            "quantization": engine.quantization,
            "kv_cache_dtype": engine.kv_cache_dtype,
            "stats": {field.name: getattr(engine.stats, field.name) for field in engine.stats.DESCRIPTOR.fields},
        }
        for engine in answer.engines
    ]
    return {"open_request_count": answer.open_request_count, "engines": engines}


def table(answer: gateway_pb2.GetStatsResponse) -> Table:
    """One column an engine."""
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column(f"{answer.open_request_count} open requests")
    for engine in answer.engines:
        drawn.add_column(engine.address, justify="right")
    drawn.add_row("model", *(engine.model if engine.reachable else "not reachable" for engine in answer.engines))
    drawn.add_row("number format", *(engine.dtype for engine in answer.engines))
    drawn.add_row("quantization", *(engine.quantization for engine in answer.engines))
    drawn.add_row("keys and values", *(engine.kv_cache_dtype for engine in answer.engines))
    for field in engine_pb2.EngineStats.DESCRIPTOR.fields:
        label = field.name.removesuffix("_count").replace("_", " ")
        values = [str(getattr(engine.stats, field.name)) if engine.reachable else "" for engine in answer.engines]
        drawn.add_row(label, *values)
    drawn.add_row("resident beside weights and kv", *(rest_of(engine.stats) for engine in answer.engines))
    return drawn


def rest_of(stats: engine_pb2.EngineStats) -> str:
    """What of an engine's process is in RAM that is neither weights nor KV: all, and without the pages of files."""
    if not stats.resident_bytes:
        return ""
    rest = stats.resident_bytes - stats.resident_weight_bytes - stats.resident_kv_bytes
    return f"{rest / 1e6:.0f} MB, {(rest - stats.resident_file_bytes) / 1e6:.0f} MB without files"
