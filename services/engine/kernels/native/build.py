"""Builds the extension once a machine: sources here, result in the cache, named by everything that it depends on.

Knows compilers and files; nothing of what the sources compute. Two processes that need it at the same time build it
once: the second waits for the first one's lock. An image, which has no compiler and nothing to write to, holds it
beside the sources (`prebuild`), named by the same things but the compiler. What instructions it uses is decided where
it runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from headrace.models import cache_dir

_log = logging.getLogger("headrace.engine.native")
_HERE = Path(__file__).parent
_EXTRA = tuple(os.environ.get("HEADRACE_NATIVE_FLAGS", "").split())  # for compiler and linker: sanitizers
_COMMON = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-w", *_EXTRA)
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mtune=icelake-server")
_NEEDED = ("avx2", "fma")
_UNITS: dict[str, tuple[str, ...]] = {
    "ops.cpp": (),
    "team.cpp": (),
    "avx2.cpp": _AVX2,
    "avx512.cpp": _AVX512,
    "avx512_vnni.cpp": (*_AVX512, "-mavx512vnni"),
    "avx512_bf16.cpp": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    "sampler_avx2.cpp": (*_AVX2, "-ffp-contract=off"),
    "sampler_avx512.cpp": (*_AVX512, "-ffp-contract=off"),
}
_BUILD_LIMIT_S = 600
_NAME = "headrace_native.so"
_PREBUILT = _HERE / "prebuilt"


class NotBuilt(Exception):
    """The extension cannot be had here; the message is the reason."""


def library() -> Path:
    """Path of the built extension, building it if that has not been done.

    Raises:
        NotBuilt: no compiler, a processor without AVX2, or the compiler's first complaint.
    """
    missing = [flag for flag in _NEEDED if flag not in cpu_flags()]
    if platform.machine() != "x86_64" or missing:
        raise NotBuilt("the processor has no AVX2" + (f" ({', '.join(missing)} missing)" if missing else ""))
    prebuilt = _PREBUILT / _key() / _NAME
    if prebuilt.exists():
        return prebuilt
    compiler = _compiler()
    directory = cache_dir() / "native" / _key(_version(compiler))
    target = directory / _NAME
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            _log.info("building native kernels into %s (once; about a minute)", directory)
            began = time.monotonic()
            _build(compiler, target)
            _log.info("native kernels built in %.0f s", time.monotonic() - began)
    return target


def prebuild() -> Path:
    """Builds the extension beside the sources, on any x86-64 processor; returns its path. Raises NotBuilt."""
    target = _PREBUILT / _key() / _NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    _build(_compiler(), target)
    return target


def cpu_flags() -> frozenset[str]:
    """What the kernel says that the processor has; empty where it does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("flags"):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            return path
    raise NotBuilt("no C++ compiler was found (g++, c++, clang++ or CXX)")


def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _key(compiler_version: str = "") -> str:
    """Hash of sources, flags, torch and compiler; without one: of what a prebuilt library must match."""
    digest = hashlib.sha256()
    for path in sorted((*_HERE.glob("*.cpp"), *_HERE.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update(repr((_COMMON, sorted(_UNITS.items()), torch.__version__, compiler_version)).encode())
    return digest.hexdigest()[:20]


def _build(compiler: str, target: Path) -> None:
    """Compile the units side by side, link them, and put the result in its place in one move."""
    home = Path(torch.__file__).parent
    includes = ["-isystem", str(home / "include"), "-isystem", str(home / "include/torch/csrc/api/include")]
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        scratch = Path(name)
        commands = [
            _compile(compiler, unit, scratch, (*flags, *(includes if unit == "ops.cpp" else ())))
            for unit, flags in _UNITS.items()
        ]
        running = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for command in commands
        ]
        complaints = [_finish(process) for process in running]
        for complaint in complaints:
            if complaint is not None:
                raise NotBuilt(complaint)
        result = scratch / target.name
        libraries = [f"-L{home / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-lgomp", *_EXTRA]
        link = [compiler, "-shared", *(str(scratch / f"{unit}.o") for unit in _UNITS), "-o", str(result), *libraries]
        complaint = _finish(subprocess.Popen(link, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        if complaint is not None:
            raise NotBuilt(complaint)
        result.replace(target)


def _compile(compiler: str, unit: str, scratch: Path, flags: tuple[str, ...]) -> list[str]:
    return [compiler, *_COMMON, *flags, "-c", str(_HERE / unit), "-o", str(scratch / f"{unit}.o")]


def _finish(process: subprocess.Popen[str]) -> str | None:
    """Wait for a compiler; its first complaint when it failed."""
    try:
        output, _ = process.communicate(timeout=_BUILD_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return f"the compiler took longer than {_BUILD_LIMIT_S} s"
    if process.returncode == 0:
        return None
    lines = [line for line in output.splitlines() if "error" in line] or output.splitlines() or ["no message"]
    return f"the compiler failed: {lines[0]}"


if __name__ == "__main__":  # when an image is built
    sys.stdout.write(f"{prebuild()}\n")
