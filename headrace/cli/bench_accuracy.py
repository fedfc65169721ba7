"""`headrace bench accuracy`: whether int8 is near enough to bfloat16, on a text of this repository."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from headrace.bench import accuracy
from headrace.cli import bench_engine, output, pipeline, up

_TEXT = "ARCHITECTURE.md"


def add_parser(kinds: Any) -> None:
    """Adds the subcommand."""
    defaults = accuracy.Limits()
    parser: argparse.ArgumentParser = kinds.add_parser(
        "accuracy",
        help="what int8 costs in accuracy; fails beyond the limits",
        description="Runs a text through the model in bfloat16 and in int8, in process, and reports the perplexity of "
        "both, how often their greedy choices agree, and the largest drift of a logit. What is int8 is what "
        "--quantization and --kv-cache-dtype say; neither: the weights.",
        epilog=output.EXIT_CODES + "; 1 also: a figure is beyond its limit",
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help=f"(default: {_TEXT} of this checkout)")
    parser.add_argument("--tokens", type=output.positive, default=4096, metavar="N", help="of the text (%(default)s)")
    parser.add_argument("--window", type=output.positive, default=512, metavar="N", help="of context (%(default)s)")
    for flag, value, text in (
        ("--max-perplexity-ratio", defaults.perplexity_ratio, "int8 to bfloat16"),
        ("--min-agreement", defaults.agreement, "share of places with the same greedy choice"),
        ("--max-drift", defaults.drift, "of any logit"),
    ):
        parser.add_argument(flag, type=float, default=value, metavar="LIMIT", help=f"{text} (%(default)s)")
    up.add_engine_options(parser)
    output.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it; raises CommandError."""
    limits = accuracy.Limits(arguments.max_perplexity_ratio, arguments.min_agreement, arguments.max_drift)
    variables = {**os.environ, **up.variables_of(arguments)}
    path = arguments.text or pipeline.services_root() / _TEXT
    bench_engine.prepare(variables)
    try:
        with bench_engine.loading(), output.progress() as show:
            show("loading both models", None)
            config = accuracy.engine_config(variables)
            if config.quantization == "none" and config.kv_cache_dtype == "auto":
                config = replace(config, quantization="int8")
            ids = _token_ids(path, config.model_dir)[: arguments.tokens]
            report = accuracy.measure(
                config,
                ids,
                window=arguments.window,
                limits=limits,
                tick=lambda tokens: show("comparing", tokens / len(ids)),
            )
    except OSError as error:
        raise output.CommandError(str(error), output.BAD_USAGE) from error
    output.stdout(json_target=arguments.json).print(table(report))
    output.write_json(arguments.json, report)
    return output.FAILED if report["failures"] else output.OK


def table(report: dict[str, Any]) -> Table:
    """The report for people."""
    limits = report["limits"]
    changed = {"weights": report["quantization"], "keys and values": report["kv_cache_dtype"]}
    name = " and ".join(f"{what} in int8" for what, how in changed.items() if how == "int8") or "bfloat16"
    drawn = Table(
        title=f"{name} against bfloat16, {report['places']} places", title_justify="left", box=None, pad_edge=False
    )
    drawn.add_column("")
    drawn.add_column("", justify="right")
    drawn.add_column("limit", justify="right")
    drawn.add_column("")
    for label, side in (("bfloat16", "baseline"), ("int8", "candidate")):
        megabytes, kilobytes = report["weight_bytes"][side] / 1e6, report["kv_bytes_per_token"][side] / 1e3
        sizes = f"{megabytes:.0f} MB of weights, {kilobytes:.1f} kB of KV a token"
        drawn.add_row(f"perplexity, {label}", f"{report['perplexity'][side]:.3f}", "", sizes)
    for key, label, sign in (
        ("perplexity_ratio", "perplexity, ratio", "<="),
        ("agreement", "greedy choices that agree", ">="),
        ("drift", "largest drift of a logit", "<="),
    ):
        verdict = "beyond" if key in report["failures"] else "within"
        drawn.add_row(label, f"{report[key]:.4f}", f"{sign} {limits[key]:g}", verdict)
    drawn.add_row("mean drift", f"{report['mean_drift']:.4f}", "", "")
    drawn.add_row("mean divergence (KL)", f"{report['divergence']:.5f}", "", "nats a token")
    return drawn


def _token_ids(path: Path, model_dir: Path) -> list[int]:
    """The text as the model's tokenizer has it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    return list(tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids)
