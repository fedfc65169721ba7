"""What the images, the compose files and the services say about the same things."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from services.common import settings, telemetry
from services.engine.settings import EngineProcessSettings
from services.gateway.settings import GatewaySettings
from services.stream.settings import StreamSettings
from services.tokenizer.settings import TokenizerSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SETTINGS: dict[str, type] = {
    "gateway": GatewaySettings,
    "tokenizer": TokenizerSettings,
    "stream": StreamSettings,
    "engine": EngineProcessSettings,
}
# After the grace period: open calls end (1 s), the service is stopped (1 s), the last spans are sent.
AFTER_GRACE_S = 2.0 + telemetry.SHUTDOWN_S
OVERLAYS = ("scale", "observability", "gpu", "secrets", "tls")
_VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


@dataclass
class Image:
    """One target of the Dockerfile, with what it inherits."""

    base: str
    env: dict[str, str] = field(default_factory=dict)
    user: str = ""
    health: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    exposed: list[int] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    text: str = ""


def images() -> dict[str, Image]:
    """Every stage of the Dockerfile by name."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, Image] = {}
    image = Image("")
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            parent = found.get(base, Image(base))
            image = Image(base, dict(parent.env), parent.user, list(parent.health), list(parent.command))
            image.copied = list(parent.copied)
            found[name] = image
        image.text += line + "\n"
        if word == "ENV":
            image.env |= dict(pair.split("=", 1) for pair in rest.split())
        elif word == "USER":
            image.user = rest
        elif word == "EXPOSE":
            image.exposed = [int(port) for port in rest.split()]
        elif word == "COPY":
            image.copied.append(rest)
        elif word == "CMD":
            image.command = yaml.safe_load(rest)
        elif word == "HEALTHCHECK":
            image.health = [] if rest == "NONE" else yaml.safe_load(rest.partition("CMD ")[2])
    return found


def interpolated(value: Any) -> Any:
    """A compose value with the defaults of its variables."""
    if isinstance(value, str):
        return _VARIABLE.sub(lambda m: m[3] if m[2] == "-" else m[1], value)
    if isinstance(value, list):
        return [interpolated(item) for item in value]
    if isinstance(value, dict):
        return {key: interpolated(item) for key, item in value.items()}
    return value


def files(*overlays: str) -> list[str]:
    """The compose files of these overlays, with those that two of them need together."""
    pairs = [f"{first}.{second}" for first in overlays for second in overlays]
    together = [name for name in pairs if (DEPLOY / f"compose.{name}.yaml").exists()]
    return ["compose.yaml", *(f"compose.{name}.yaml" for name in (*overlays, *together))]


def composed(*overlays: str) -> dict[str, Any]:
    """The services of compose.yaml with overlays on top, as compose merges the keys that we use."""
    services: dict[str, Any] = {}
    for name in files(*overlays):
        for service, wanted in interpolated(_parsed(DEPLOY / name))["services"].items():
            merged = services.setdefault(service, {})
            for key, value in wanted.items():
                merged[key] = _merged(merged.get(key), value)
    return services


@functools.cache
def _parsed(file: Path) -> Any:
    return yaml.safe_load(file.read_text())


def _merged(kept: Any, wanted: Any) -> Any:
    if isinstance(kept, dict) and isinstance(wanted, dict):
        return {key: value for key, value in {**kept, **wanted}.items() if value is not None}
    if isinstance(kept, list) and isinstance(wanted, list) and not any("=" in item or " " in item for item in wanted):
        return kept + [item for item in wanted if item not in kept]
    return wanted


def process_of(service: str) -> str | None:
    """The process that a service runs: "engine-2" runs the engine."""
    name = re.sub(r"-\d+$", "", service)
    return name if name in SETTINGS else None


def seconds(text: str) -> float:
    """A compose duration."""
    return float(text.removesuffix("s"))


def loaded(process: str, environment: dict[str, str]) -> Any:
    """The settings that a process makes of an environment; raises SettingsError."""
    return settings.load(SETTINGS[process], environment, process)
