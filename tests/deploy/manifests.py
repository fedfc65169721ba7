"""What an overlay of deploy/k8s comes to: the part of kustomize that ours use (resources, JSON patches)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

Manifest = dict[str, Any]


def rendered(folder: Path) -> list[Manifest]:
    """Every manifest of a kustomization, patched. Raises ValueError for what this does not know."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = set(kustomization) - {"apiVersion", "kind", "resources", "patches"}
    if unknown:
        raise ValueError(f"{folder}: {sorted(unknown)}")
    manifests: list[Manifest] = []
    for resource in kustomization["resources"]:
        place = folder / resource
        manifests += rendered(place) if place.is_dir() else list(yaml.safe_load_all(place.read_text()))
    for patch in kustomization.get("patches", []):
        target = patch["target"]
        found = [m for m in manifests if (m["kind"], m["metadata"]["name"]) == (target["kind"], target["name"])]
        if len(found) != 1:
            raise ValueError(f"{folder}: {target} is there {len(found)} times")
        for operation in yaml.safe_load(patch["patch"]):
            _apply(found[0], operation)
    return manifests


def _apply(manifest: Manifest, operation: dict[str, Any]) -> None:
    """One JSON patch operation (RFC 6902): test, add or replace."""
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"][1:].split("/")]
    place: Any = manifest
    for part in path:
        place = place[int(part) if isinstance(place, list) else part]
    if operation["op"] == "test":
        if place[last] != operation["value"]:
            raise ValueError(f"{operation['path']} is {place[last]!r}")
        return
    if operation["op"] not in ("add", "replace"):
        raise ValueError(operation["op"])
    if isinstance(place, list):
        if (operation["op"], last) != ("add", "-"):
            raise ValueError(operation["path"])
        place.append(operation["value"])
    elif operation["op"] == "replace" and last not in place:
        raise ValueError(f"{operation['path']} is not there")
    else:
        place[last] = operation["value"]


def mebibytes(quantity: str) -> float:
    """A memory quantity in MiB."""
    number, unit = re.fullmatch(r"(\d+)(Mi|Gi)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * {"Mi": 1, "Gi": 1024}[unit]
