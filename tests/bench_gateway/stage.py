"""Real processes for the measurements: pipelines of this machine, keys, and a model that costs next to nothing."""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.cli.pipeline import PipelineOptions, Plan, running
from headrace.cli.supervisor import Supervisor
from headrace.models import resolve
from tests.engine.factories import tiny_config, write_model
from tests.pipeline.conftest import PROCESSES, VOCABULARY, add_tokenizer


@dataclass
class Stage:
    """A running pipeline."""

    plan: Plan
    supervisor: Supervisor


@contextlib.contextmanager
def stage(modules: Mapping[str, str] | None = None, **variables: str) -> Iterator[Stage]:
    """Four processes on free ports, untraced; `variables` are settings by name, HEADRACE_ left out."""
    settings = {"HEADRACE_TRACE_LEVEL": "0", **{f"HEADRACE_{name}": value for name, value in variables.items()}}
    options = PipelineOptions(settings, ports=dict.fromkeys(PROCESSES, 0), modules=modules or {})
    with running(options, timeout_s=60) as (plan, supervisor):
        yield Stage(plan, supervisor)


@contextlib.contextmanager
def tiny_model() -> Iterator[Path]:
    """Two layers of noise with the default model's tokenizer."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "random"
        write_model(path, tiny_config(vocab_size=VOCABULARY, max_position_embeddings=2048))
        yield add_tokenizer(path, resolve())


@contextlib.contextmanager
def keys(**tenants: Mapping[str, object]) -> Iterator[Path]:
    """A file of keys: each tenant's key is its name."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "keys.toml"
        lines = []
        for tenant, fields in tenants.items():
            lines += ["[[keys]]", f'sha256 = "{hashlib.sha256(tenant.encode()).hexdigest()}"', f'tenant = "{tenant}"']
            lines += [f"{name} = {value!r}" for name, value in fields.items()]
        path.write_text("\n".join(lines), encoding="utf-8")
        yield path
