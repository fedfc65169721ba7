"""Fixtures that every test may use."""

from pathlib import Path

import pytest

from headrace.models import DEFAULT_MODEL, ModelNotFound, import_model, resolve


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model's directory; imported (fetched, checked, converted) if this machine lacks it."""
    try:
        return resolve(DEFAULT_MODEL)
    except ModelNotFound:
        return import_model()
