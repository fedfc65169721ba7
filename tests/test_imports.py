"""Dependencies point one way, and each folder knows only what it should."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SERVICES = ("gateway", "tokenizer", "stream", "engine")
# The only files of a service that may speak gRPC: its own edge, and its calls to other processes.
GRPC_FILES = {"service.py", "peers.py"}
WIRE_FILES = GRPC_FILES | {"wire.py", "spans.py", "delivery.py", "session.py", "sessions.py", "facts.py"}


def files(*parts: str) -> list[Path]:
    found = sorted(ROOT.joinpath(*parts).rglob("*.py"))
    assert found, parts
    return found


def imports(path: Path, *, lazy: bool = True) -> set[str]:
    """Full names of the modules that a file imports; `lazy`: also those inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if lazy else iter(tree.body)
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def starts(names: set[str], *packages: str) -> set[str]:
    return {name for name in names for package in packages if name == package or name.startswith(package + ".")}


@pytest.mark.parametrize("service", SERVICES)
def test_no_service_imports_another(service):
    """A service imports headrace.v1, headrace.errors and the like, services.common and itself."""
    others = [f"services.{other}" for other in SERVICES if other != service]
    for path in files("services", service):
        assert not starts(imports(path), *others), path


def test_common_knows_no_service():
    """services.common imports no service."""
    for path in files("services", "common"):
        assert not starts(imports(path), *(f"services.{service}" for service in SERVICES)), path


def test_the_package_needs_no_service():
    """Headrace imports services only inside functions, and only from `up` and the benches."""
    allowed = {
        "accuracy.py",
        "offline.py",
        "pipeline.py",
        "up.py",
        "in_process.py",
        "null_engine.py",
        "slowed_engine.py",
    }
    peers = ROOT / "headrace/bench/peers"
    workers = {peers / "workers" / name for name in ("attention.py", "vllm_attention.py")}
    # Processes of their own, or parts of one.
    heavy_ones = {*files("headrace", "models", "gguf"), peers / "weights.py", *workers}
    for path in set(files("headrace")) - {peers / "workers/ours_attention.py"}:
        heavy = () if path in heavy_ones else ("torch", "transformers", "gguf")
        assert not starts(imports(path, lazy=False), "services", *heavy), path
        if path.name not in allowed:
            assert not starts(imports(path), "services"), path


@pytest.mark.parametrize("service", SERVICES)
def test_only_the_edges_speak_grpc(service):
    """Grpc is imported by service.py and peers.py alone; protobuf stops there too, except in the gateway."""
    for path in files("services", service):
        if path.name not in GRPC_FILES:
            assert not starts(imports(path), "grpc", "grpc_status", "grpc_health"), path
        if service != "gateway" and path.name not in WIRE_FILES:
            assert not starts(imports(path), "headrace.v1", "google.protobuf"), path


def test_torch_stays_in_the_engine():
    """No other process imports torch; scheduling imports neither torch nor grpc."""
    for service in ("common", "gateway", "tokenizer", "stream"):
        for path in files("services", service):
            assert not starts(imports(path), "torch"), path
    for name in (
        "request",
        "plan",
        "scheduler",
        "waiting",
        "block_pool",
        "prefix_cache",
        "limits",
        "outputs",
        "step",
        "budget",
        "paused",
    ):
        assert not starts(imports(ROOT / "services" / "engine" / f"{name}.py"), "torch", "grpc"), name


def test_one_file_touches_the_telemetry_sdk():
    """Only services/common/telemetry.py imports the SDK and its exporters; names come from names.py."""
    for path in files("services"):
        if path.name != "telemetry.py":
            assert not starts(imports(path), "opentelemetry.sdk", "opentelemetry.exporter"), path


def test_running_services_never_import_transformers():
    """Transformers and gguf are for importing a model and for tests."""
    for path in files("services"):
        assert not starts(imports(path), "transformers", "gguf"), path


def test_every_service_has_the_same_four_doors():
    """__main__, settings, service, and domain files beside them."""
    for service in SERVICES:
        names = {path.name for path in (ROOT / "services" / service).glob("*.py")}
        assert {"__init__.py", "__main__.py", "settings.py", "service.py"} < names
