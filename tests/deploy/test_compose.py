"""Every combination of compose files says of the processes what the processes can be told."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from headrace.models import DEFAULT_MODEL
from tests import certificates
from tests.deploy.stack import AFTER_GRACE_S, DEPLOY, OVERLAYS, composed, files, images, loaded, process_of, seconds

COMBINATIONS = [c for size in range(len(OVERLAYS) + 1) for c in itertools.combinations(OVERLAYS, size)]
EVERY = pytest.mark.parametrize("overlays", COMBINATIONS, ids=lambda c: "+".join(c) or "alone")
IMAGES = images()
COMPOSE = shutil.which("docker-compose")


def environment(service: dict, process: str) -> dict[str, str]:
    """What the container's process sees of ours: the image's variables, and the service's on top."""
    merged = {**IMAGES[process].env, **service.get("environment", {})}
    return {k: v for k, v in merged.items() if k.startswith("HEADRACE_") and k != "HEADRACE_CONFIG"}


@EVERY
def test_every_variable_is_a_setting(overlays: tuple[str, ...]) -> None:
    """Each process starts with its variables: names exist, values are in range."""
    for name, service in composed(*overlays).items():
        if process := process_of(name):
            variables = environment(service, process)
            loaded(process, variables)
            for variable in variables:
                section = variable.removeprefix("HEADRACE_").split("_")[0].lower()
                known = {
                    process,
                    "trace",
                    "log",
                    "cache",
                    "model",
                    "peers",
                    *(["redis"] if process in ("stream", "gateway") else []),
                }
                assert section in known, (name, variable)


@EVERY
def test_addresses_lead_somewhere(overlays: tuple[str, ...]) -> None:
    """Each address that a process is given is a service of that kind, at the port of its image."""
    services = composed(*overlays)
    engines = sorted(f"{name}:50053" for name in services if process_of(name) == "engine")
    for name, service in services.items():
        process = process_of(name)
        if not process:
            continue
        settings = loaded(process, environment(service, process))
        if process == "gateway":
            assert settings.peers.tokenizer_address == "tokenizer:50051"
            assert settings.peers.stream_address == "stream:50052"
            assert sorted(settings.peers.engine_addresses) == engines
        collector = re.fullmatch(r"http://([a-z]+):4317", settings.trace.endpoint)
        assert collector, (name, settings.trace.endpoint)
        assert collector[1] in services
        if process in ("stream", "gateway") and "secrets" not in overlays:
            assert settings.redis.url == "redis://redis:6379/0"


@EVERY
def test_a_stop_waits_for_the_process(overlays: tuple[str, ...]) -> None:
    """Compose kills nobody who is still within the grace period and what follows it."""
    for name, service in composed(*overlays).items():
        if process := process_of(name):
            grace_s = loaded(process, environment(service, process)).server.grace_s
            assert seconds(service["stop_grace_period"]) >= grace_s + AFTER_GRACE_S, name


@EVERY
def test_containers_are_locked(overlays: tuple[str, ...]) -> None:
    """No container can write outside its volumes, gain rights, or take all memory."""
    for name, service in composed(*overlays).items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"], name
        user = service.get("user") or IMAGES[process_of(name) or "model"].user
        assert user.split(":")[0] not in ("", "0", "root"), name
        if process_of(name):
            assert all(volume.endswith(":ro") for volume in service.get("volumes", [])), name
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), (name, port)


@EVERY
def test_the_order_is_that_of_the_calls(overlays: tuple[str, ...]) -> None:
    """A gateway starts after whom it calls and stops before them; a stream process before the engines."""
    services = composed(*overlays)
    for name, service in services.items():
        needs = service.get("depends_on", {})
        assert set(needs) <= set(services), name
        if process_of(name) == "gateway":
            assert {needs[peer]["condition"] for peer in ("tokenizer", "stream", "engine")} == {"service_healthy"}
        if process_of(name) == "stream":
            assert set(needs) >= {engine for engine in services if process_of(engine) == "engine"}
        if process_of(name) in ("tokenizer", "stream", "engine"):
            assert needs["model"]["condition"] == "service_completed_successfully"


def test_alone_it_is_what_the_readme_says() -> None:
    """Compose without any variable: gateway on 50050, Jaeger on 16686, the default model."""
    services = composed()
    assert set(services) == {"model", "gateway", "tokenizer", "stream", "engine", "redis", "jaeger"}
    assert services["gateway"]["ports"] == ["127.0.0.1:50050:50050"]
    assert services["jaeger"]["ports"] == ["127.0.0.1:16686:16686"]
    assert services["model"]["command"][-1] == DEFAULT_MODEL
    for process in ("tokenizer", "stream", "engine"):
        assert services[process]["environment"]["HEADRACE_MODEL"] == DEFAULT_MODEL


@pytest.mark.parametrize("overlays", [("scale",), ("scale", "secrets", "tls")], ids="+".join)
def test_twins_are_alike(overlays: tuple[str, ...]) -> None:
    """The second engine and the second gateway are the first, but for where they are published."""
    services = composed(*overlays)
    for twin in ("engine-2", "gateway-2"):
        first = services[twin.removesuffix("-2")]
        for key in set(services[twin]) - {"ports", "logging"}:
            expected = first[key]
            if key == "healthcheck":
                expected = {**expected, "test": [twin if part == "engine" else part for part in expected["test"]]}
            assert services[twin][key] == expected, (twin, key)


@pytest.mark.parametrize("overlays", [c for c in COMBINATIONS if "tls" in c], ids="+".join)
def test_every_hop_is_encrypted(overlays: tuple[str, ...]) -> None:
    """Each process shows a certificate of its own, wants its callers', and calls peers, Redis and collector by TLS."""
    services = composed(*overlays)
    for name, service in services.items():
        if not (process := process_of(name)):
            continue
        settings = loaded(process, environment(service, process))
        assert settings.tls.tls_certificate, name
        assert settings.peer_tls.tls_ca, name
        assert settings.peer_tls.tls_certificate.name == f"{process}.crt", name
        asks_callers = settings.tls.tls_client_ca is not None
        assert asks_callers == (process != "gateway"), name
        certificate, host, *key = service["healthcheck"]["test"][5:]
        assert certificate == str(settings.tls.tls_certificate)
        assert host == ("localhost" if process == "gateway" else name)
        assert key == ([str(settings.tls.tls_key)] if asks_callers else [])
    receivers = {"jaeger", "collector"} & set(services)
    for name in receivers | {"redis"}:
        assert set(services[name]["secrets"]) >= {"ca.crt", f"{name}.crt", f"{name}.key"}, name


def test_the_script_makes_what_is_mounted(tmp_path: Path) -> None:
    """`certificates.sh` makes each file that the overlays of TLS mount, for the name that the service is called by."""
    made = certificates.make(tmp_path / "secrets")
    assert made.stat().st_mode & 0o777 == 0o700
    assert (made / "ca.key").stat().st_mode & 0o777 == 0o600
    services = composed("scale", "observability", "tls")
    for name, service in services.items():
        for secret in service.get("secrets", []):
            assert (made / secret).stat().st_mode & 0o777 == 0o644, (name, secret)
            if secret.endswith(".crt") and secret not in ("ca.crt", "public.crt"):
                assert name in certificates.hosts(made / secret), secret


def test_secrets_are_in_files_alone() -> None:
    """No compose file holds a password; those of the overlays come from files that are not in the repository."""
    for file in DEPLOY.glob("compose*.yaml"):
        text = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith("#"))
        assert not re.search(r"(?i)requirepass|redis://[^:/@\s]*:[^@\s]+@|password: *['\"]?\w", text), file
    services = composed("scale", "secrets", "tls")
    for name in ("stream", "gateway", "gateway-2"):
        assert "HEADRACE_REDIS_URL" not in services[name]["environment"]
        assert services[name]["environment"]["HEADRACE_CONFIG"] == "/run/secrets/headrace.toml"
    keys = [f"{name}.{kind}" for name in ("public", "gateway") for kind in ("crt", "key")]
    assert services["gateway"]["secrets"] == ["headrace.toml", "ca.crt", *keys]
    for service in services.values():
        for variable, value in service.get("environment", {}).items():
            if value.startswith("/run/secrets/"):
                assert value.removeprefix("/run/secrets/") in service["secrets"], variable


def test_mounted_files_exist() -> None:
    """What an overlay mounts from here is here, and Prometheus asks the ports that processes offer."""
    for service in composed("observability").values():
        for volume in service.get("volumes", []):
            if volume.startswith("./"):
                assert (DEPLOY / volume.split(":")[0]).exists(), volume
    scrape = yaml.safe_load((DEPLOY / "observability" / "prometheus.compose.yml").read_text())["scrape_configs"][0]
    asked = {(name, sd["port"]) for sd in scrape["dns_sd_configs"] for name in sd["names"]}
    offered = {
        (name, int(IMAGES[process].env[f"HEADRACE_{process.upper()}_METRICS_PORT"]))
        for name in composed("observability", "scale")
        if (process := process_of(name))
    }
    assert asked == offered


@pytest.mark.skipif(COMPOSE is None, reason="docker-compose is not here")
@pytest.mark.parametrize("overlays", [c for c in COMBINATIONS if len(c) in (0, 1, len(OVERLAYS))], ids="+".join)
def test_compose_takes_it(overlays: tuple[str, ...]) -> None:
    """`compose config` finds nothing wrong."""
    assert COMPOSE
    done = subprocess.run(
        [COMPOSE, *(f"--file={name}" for name in files(*overlays)), "config", "-q"],
        check=False,
        cwd=DEPLOY,
        env={**os.environ, "GRAFANA_PASSWORD": "chosen", "HEADRACE_SECRETS": "/run/secrets-of-a-test"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
