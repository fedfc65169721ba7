"""What a run was made on and with: runs are compared only where this says that they can be.

Five parts: hardware, versions, model, workload, configuration. Values are plain text or numbers, never a path or a host
name: an archive may be shown to others.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.bench.load.spec import LoadSpec
from headrace.sync_client import Client
from headrace.v1 import gateway_pb2

PARTS = ("hardware", "versions", "model", "workload", "configuration")
PACKAGES = ("grpcio", "protobuf", "numpy", "torch", "tokenizers", "safetensors")
TIMEOUT_S = 10.0
_PREFIX = "HEADRACE_"
# Words of settings that are secrets or places.
_KEPT_OUT = {"KEY", "TOKEN", "PASSWORD", "URL", "PATH", "FILE", "ADDRESS", "ADDRESSES", "HOST", "PORT", "ENDPOINT"}
_PLACES = ("HEADRACE_CACHE", "HEADRACE_MODEL")  # of the model the server says what it is


def make(spec: LoadSpec, address: str, api_key: str | None, configuration: Mapping[str, str]) -> dict[str, Any]:
    """The fingerprint of a run.

    Args:
        spec: its load.
        address: host:port of the gateway, which says what it serves.
        api_key: for asking it.
        configuration: the server's settings as far as they are known.

    Raises:
        errors.HeadraceError: the gateway does not answer.
    """
    with Client(address, api_key=api_key) as client:
        models = client.list_models(timeout=TIMEOUT_S)
    return {
        "hardware": hardware(),
        "versions": versions(),
        "model": {one.name: described(one) for one in models},
        "workload": {"digest": spec.digest},
        "configuration": settings(configuration),
    }


def described(model: gateway_pb2.Model) -> str:
    """A model as far as it can change a figure."""
    quantised = "" if model.quantization in ("", "none") else f"{model.quantization}, "
    kept = "" if model.kv_cache_dtype in ("", model.dtype) else f"KV {model.kv_cache_dtype}, "
    return f"{model.architecture}, {model.dtype}, {quantised}{kept}{model.context_length} tokens"


def hardware() -> dict[str, Any]:
    """Processor, cores that may be used, memory, GPUs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(memory / 2**30),
        "gpus": _gpus(),
    }


def versions() -> dict[str, str]:
    """Of everything that a figure can depend on beside our own code, whose commit is `code`."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.release()}"}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found | {"code": _code()}


def settings(configuration: Mapping[str, str]) -> dict[str, str]:
    """Settings that can change a figure, without places and secrets: given ones and those of the environment.

    Of the file that HEADRACE_CONFIG names there is a digest.
    """
    environment = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
    chosen = {**environment, **configuration}
    file = chosen.get("HEADRACE_CONFIG")
    if file:
        chosen["HEADRACE_CONFIG"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]
    return {
        name: value
        for name, value in sorted(chosen.items())
        if name not in _PLACES and not _KEPT_OUT & set(name.split("_"))
    }


def mismatches(
    one: Mapping[str, Any], other: Mapping[str, Any], changed: Sequence[str] = (), *, same_code: bool = False
) -> list[str]:
    """Why two runs cannot be compared, a line a reason.

    Args:
        one: a fingerprint.
        other: another.
        changed: what may differ: settings by name, or `part.name`.
        same_code: the code may not differ either.
    """
    allowed = {*changed, *(f"configuration.{name}" for name in changed)}
    allowed |= set() if same_code else {"versions.code"}
    return [text for name, text in _different(one, other).items() if name not in allowed]


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Everything that differs, a line each."""
    return list(_different(one, other).values())


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {name.strip(): value.strip() for name, value in facts.items()}
    family = named.get("cpu family", "")
    return f"{named.get('model name', platform.machine())} (family {family}, model {named.get('model', '')})"


def _gpus() -> list[str]:
    found = []
    for card in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = card.read_text(encoding="utf-8", errors="replace").splitlines()
        found += [line.split(":", 1)[1].strip() for line in lines if line.startswith("Model:")]
    return found


def _code() -> str:
    """The checkout's commit, with a digest of what is not committed; the package's version where there is none."""
    root = Path(__file__).parents[2]
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        changes = _git(root, "diff", "HEAD", "--", "headrace", "services")
    except (OSError, subprocess.CalledProcessError):
        return importlib.metadata.version("headrace")
    return commit + (f"+{hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else "")


def _git(root: Path, *arguments: str) -> str:
    command = ("git", "-C", str(root), *arguments)
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for part in PARTS:
        for name in sorted({*one[part], *other[part]}):
            first, second = one[part].get(name), other[part].get(name)
            if first != second:
                found[f"{part}.{name}"] = f"{part}, {name}: {_shown(first)} and {_shown(second)}"
    return found


def _shown(value: Any) -> str:
    return "unset" if value is None else str(value)
