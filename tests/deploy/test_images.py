"""The Dockerfile's targets are the services, and each image says of its process what the process says of itself."""

from __future__ import annotations

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from deploy.requirements import requirements
from services.common import healthcheck
from services.engine.kernels.native import build
from tests.deploy.stack import DEPLOY, ROOT, SETTINGS, images, loaded

IMAGES = images()


def test_a_target_a_process() -> None:
    """Every service has a target of its name, and there is one more, which fetches the model."""
    services = {path.parent.name for path in (ROOT / "services").glob("*/__main__.py")}
    assert services == set(SETTINGS)
    assert set(IMAGES) >= services | {"model"}


@pytest.mark.parametrize("process", SETTINGS)
def test_an_image_runs_its_process(process: str) -> None:
    """Command, ports, health check and code are those of the process, on an address that others reach."""
    image = IMAGES[process]
    server = loaded(process, {k: v for k, v in image.env.items() if k.startswith("HEADRACE_")}).server
    assert server.host == "0.0.0.0"  # noqa: S104 - inside a container
    assert server.port == SETTINGS[process]().server.port
    assert server.metrics_port == server.port + 10
    assert image.exposed == [server.port, server.metrics_port]
    assert image.command == ["python", "-m", "services.common.run", process]
    assert image.health == ["python", "-m", healthcheck.__name__, f"127.0.0.1:{server.port}"]
    others = set(SETTINGS) - {process}
    assert any(f"/app/services/{process}" in copied for copied in image.copied)
    assert not any(f"/app/services/{other} " in copied for copied in image.copied for other in others)


@pytest.mark.parametrize("name", [*SETTINGS, "model", "engine-cuda"])
def test_nobody_is_root(name: str) -> None:
    """The last user of every image is one without rights."""
    assert IMAGES[name].user == "10001:10001"


def test_torch_is_in_the_engine_alone() -> None:
    """Only the engine's packages, and the model's on top of them, hold torch."""
    assert not any(line.startswith("torch") for line in requirements(["services"], ROOT / "pyproject.toml"))
    assert "torch==2.13.0" in requirements(["services", "engine"], ROOT / "pyproject.toml")
    for process in ("gateway", "tokenizer", "stream"):
        assert IMAGES[process].base == "light"
        assert not any("engine-packages" in copied for copied in IMAGES[process].copied)
    assert IMAGES["model"].base == "engine"


def test_the_engine_holds_its_extension_and_no_compiler() -> None:
    """It is compiled in a stage that no image is made from, where `library` looks for it."""
    place = build._PREBUILT.relative_to(ROOT)
    assert f"--from=native /app/{place} /app/{place}" in IMAGES["engine"].copied
    assert f"services/{build._HERE.relative_to(ROOT / 'services')}/build.py" in IMAGES["native"].text
    assert "g++" in IMAGES["native"].text
    for process in (*SETTINGS, "model"):
        name = process
        while name in IMAGES:
            assert name != "native"
            assert "apt-get" not in IMAGES[name].text, name
            name = IMAGES[name].base


def test_the_gpus_image_is_the_engines() -> None:
    """With the packages of the extra `gpu`, and a compiler for Triton's launchers."""
    assert IMAGES["engine-cuda"].base == "engine"
    assert "gpu.txt" in IMAGES["engine-cuda"].text
    assert "gcc" in IMAGES["engine-cuda"].text


def test_every_requirement_is_pinned() -> None:
    """Whatever an image needs has one version in constraints.txt, which the requirement allows."""
    lines = (DEPLOY / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    versions = {pin.split("==")[0].lower().replace("_", "-"): pin.split("==")[1] for pin in pins}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for line in requirements(["services", "engine", "gpu", "import"], ROOT / "pyproject.toml"):
        wanted = Requirement(line)
        assert wanted.specifier.contains(versions[wanted.name.lower()]), line
    assert set(project["dependencies"]) <= set(requirements([], ROOT / "pyproject.toml"))


def test_no_secret_and_no_base_of_its_own() -> None:
    """Every stage begins with the base of the build argument or another stage; nothing looks like a secret."""
    for name, image in IMAGES.items():
        code = "\n".join(line for line in image.text.splitlines() if not line.startswith("#"))
        assert image.base == "${BASE}" or image.base in IMAGES, name
        assert not re.search(r"(?i)password|secret|token=|api_?key", code), name


def test_the_context_holds_code_alone() -> None:
    """The build sees what it copies, and nothing else of a checkout."""
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert kept == ["pyproject.toml", "headrace", "services", "deploy/requirements.py", "deploy/constraints.txt"]
