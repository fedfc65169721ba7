"""What the benches that run our engine in this process do before: the model is there, and a wrong setting is told."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from headrace.cli import output, pipeline, up


def prepare(variables: Mapping[str, str]) -> None:
    """Fetches the default model if it is to be used and is missing. Raises CommandError, PipelineError."""
    pipeline.services_root()
    up.ensure_model(variables.get("HEADRACE_MODEL") or os.environ.get("HEADRACE_MODEL"))


@contextmanager
def loading() -> Iterator[None]:
    """Around the making of an engine. Raises CommandError where it cannot be made."""
    try:
        yield
    except ImportError as error:
        raise output.CommandError(f"the engine cannot be loaded here: {error}") from error
    except ValueError as error:
        raise output.CommandError(str(error), output.BAD_USAGE) from error
