"""Fixtures that every test may use."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpc is imported: its notes would mix with pytest's

from headrace.models import DEFAULT_MODEL, ModelNotFound, import_model, resolve


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model's directory; imported (fetched, checked, converted) if this machine lacks it."""
    try:
        return resolve(DEFAULT_MODEL)
    except ModelNotFound:
        return import_model()
