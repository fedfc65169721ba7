"""The real four processes on the real default model, in fp32 so that answers do not depend on the batch."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from headrace import Client
from headrace.cli.pipeline import PipelineOptions, Plan, running
from headrace.cli.supervisor import Supervisor
from headrace.v1 import engine_pb2, engine_pb2_grpc, gateway_pb2
from tests.engine.factories import tiny_config, write_model
from tests.pipeline.otlp import Receiver

VOCABULARY = 49152
PROCESSES = ("gateway", "stream", "engine", "tokenizer")


@dataclass
class Pipeline:
    """A running pipeline as tests see it."""

    plan: Plan
    supervisor: Supervisor
    receiver: Receiver

    @property
    def target(self) -> str:
        return self.plan.target

    def client(self) -> Client:
        return Client(self.target)

    def engine_state(self) -> gateway_pb2.EngineState:
        with self.client() as client:
            return client.get_stats().engines[0]

    def baseline(self) -> tuple[int, ...]:
        """What must come back after any storm: sequences, streams and KV blocks in use, and open requests."""
        with self.client() as client:
            answer = client.get_stats()
        stats = answer.engines[0].stats
        used = stats.kv_total_block_count - stats.kv_free_block_count - stats.kv_cached_block_count
        counts = (stats.running_count, stats.waiting_count, stats.paused_count, stats.open_stream_count, used)
        return (*counts, answer.open_request_count)

    def flush_prefix_cache(self) -> None:
        with grpc.insecure_channel(self.plan.addresses["engine"]) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            stub.FlushPrefixCache(engine_pb2.EngineServiceFlushPrefixCacheRequest())


def until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Waits for a condition of other processes; fails with `what` if it does not come."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.01)


@contextmanager
def start_pipeline(receiver: Receiver, **variables: str) -> Iterator[Pipeline]:
    """Four processes on free ports; `variables` are settings by name, HEADRACE_ left out."""
    settings = {
        "HEADRACE_ENGINE_DTYPE": "float32",
        "HEADRACE_ENGINE_KV_BLOCKS": "4096",
        "HEADRACE_TRACE_ENDPOINT": receiver.endpoint,
        **{f"HEADRACE_{name}": value for name, value in variables.items()},
    }
    options = PipelineOptions(variables=settings, ports=dict.fromkeys(PROCESSES, 0))
    with running(options, timeout_s=60) as (plan, supervisor):
        yield Pipeline(plan, supervisor, receiver)


@pytest.fixture(scope="session")
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.stop()


@pytest.fixture(scope="session")
def pipeline(default_model_dir: Path, receiver: Receiver) -> Iterator[Pipeline]:
    """One pipeline for every test that leaves it as it found it."""
    with start_pipeline(receiver) as running_pipeline:
        yield running_pipeline


@pytest.fixture
def own_pipeline(default_model_dir: Path, receiver: Receiver) -> Iterator[Pipeline]:
    """A pipeline for a test that breaks it."""
    with start_pipeline(receiver) as running_pipeline:
        yield running_pipeline


def add_tokenizer(directory: Path, default_model_dir: Path) -> Path:
    """Gives a model directory the default model's tokenizer and endings."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        if (default_model_dir / name).exists():
            shutil.copy(default_model_dir / name, directory / name)
    return directory


@pytest.fixture(scope="session")
def random_model(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """RANDOM: two layers of noise, fast; its output is full of half characters."""
    directory = tmp_path_factory.mktemp("random") / "random"
    write_model(directory, tiny_config(vocab_size=VOCABULARY, max_position_embeddings=2048))
    return add_tokenizer(directory, default_model_dir)


@pytest.fixture(scope="session")
def tiny_pipeline(random_model: Path, receiver: Receiver) -> Iterator[Pipeline]:
    """A pipeline whose engine costs next to nothing, for tests of everything else."""
    with start_pipeline(receiver, MODEL=str(random_model)) as running_pipeline:
        yield running_pipeline
