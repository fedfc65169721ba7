"""Fixtures that every test may use."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpc is imported: its notes would mix with pytest's
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: without a GPU its kernels run as Python

from headrace.models import DEFAULT_MODEL, ModelNotFound, import_model, resolve
from tests.redis_server import RedisServer

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: what is started here is interrupted
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The default model's directory; imported (fetched, checked, converted) if this machine lacks it."""
    try:
        return resolve(DEFAULT_MODEL)
    except ModelNotFound:
        return import_model()


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One real Redis for every test that only adds keys of its own."""
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture
def own_redis_server() -> Iterator[RedisServer]:
    """A Redis for a test that stops it."""
    server = RedisServer()
    yield server
    server.close()
