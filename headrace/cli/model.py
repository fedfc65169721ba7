"""`headrace model import|list`: the models of this machine."""

from __future__ import annotations

import argparse
from typing import Any

from rich.table import Table

from headrace.cli import output
from headrace.models import ModelError, ModelInfo, ModelNotFound, import_model, list_models, models_dir
from headrace.models.families import FAMILIES


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser("model", help="import or list models")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    importing: argparse.ArgumentParser = verbs.add_parser(
        "import",
        help="bring a model into the store",
        description=f"Fetches, checks and converts a model. Without SOURCE: the default one. What is there is kept. "
        f"Families: {', '.join(FAMILIES)}. GGUF: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, Q2_K to Q6_K.",
        epilog=output.EXIT_CODES,
    )
    importing.add_argument(
        "source",
        nargs="?",
        metavar="SOURCE",
        help="a .gguf file (converted), a Hugging Face style directory (linked), or owner/name of the hub (fetched)",
    )
    importing.add_argument("--name", help="what to call it (default: made from the source)")
    output.add_json_option(importing)
    importing.set_defaults(run=run_import)
    listing: argparse.ArgumentParser = verbs.add_parser("list", help="show the store", epilog=output.EXIT_CODES)
    output.add_json_option(listing)
    listing.set_defaults(run=run_list)


def run_import(arguments: argparse.Namespace) -> int:
    """Runs `model import`; raises CommandError."""
    directory = fetch(arguments.source, arguments.name)
    output.stdout(json_target=arguments.json).print(f"imported: {directory}", soft_wrap=True)
    output.write_json(arguments.json, {"directory": str(directory)})
    return output.OK


def fetch(source: str | None, name: str | None = None) -> Any:
    """Imports with a progress line; returns the directory. Raises CommandError."""
    try:
        with output.progress() as show:
            return import_model(source, name, progress=show)
    except ModelNotFound as error:
        raise output.CommandError(str(error), output.BAD_USAGE) from error
    except ModelError as error:
        raise output.CommandError(str(error)) from error


def run_list(arguments: argparse.Namespace) -> int:
    """Runs `model list`."""
    models = list_models()
    console = output.stdout(json_target=arguments.json)
    if models:
        console.print(table(models))
    else:
        console.print(f"no model in {models_dir()}; `headrace model import` fetches the default one", soft_wrap=True)
    output.write_json(arguments.json, {"models": [as_json(model) for model in models]})
    return output.OK


def as_json(model: ModelInfo) -> dict[str, Any]:
    """One stored model."""
    return {
        "name": model.name,
        "directory": str(model.directory),
        "size_bytes": model.size_bytes,
        "architecture": model.architecture,
        "dtype": model.dtype,
        "context": model.context,
        "problem": model.problem,
    }


def table(models: list[ModelInfo]) -> Table:
    """One row a model."""
    drawn = Table(box=None, pad_edge=False)
    for header in ("name", "architecture", "dtype"):
        drawn.add_column(header)
    for header in ("context", "MB"):
        drawn.add_column(header, justify="right")
    drawn.add_column("problem", overflow="fold")
    for model in models:
        size = f"{model.size_bytes / 1e6:.0f}"
        drawn.add_row(model.name, model.architecture, model.dtype, str(model.context), size, model.problem)
    return drawn
