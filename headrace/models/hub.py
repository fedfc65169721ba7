"""Fetches a model from the Hugging Face hub, through the hub client's own cache.

The client's settings apply (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT). What its cache holds is used without
a network, and without a second copy where both caches share a file system. Knows nothing of the store.
"""

import importlib.util
import os
import shutil
from pathlib import Path

from headrace.models.errors import ImportFailed, Progress
from headrace.models.store import validate

_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "LICENSE*")


def fetch_from_hub(hub_id: str, directory: Path, progress: Progress) -> None:
    """Fill the empty `directory` with the model's files, after checking them.

    Raises:
        ImportFailed: not to be had; the sentence says why and what to do.
        ModelBroken: what the hub, or its cache, holds cannot be served.
    """
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ImportFailed(
            f"Fetching {hub_id} needs huggingface_hub; run `pip install 'headrace[import]'`, or import a "
            "directory that you fetched yourself."
        )
    from huggingface_hub import snapshot_download

    progress(f"downloading {hub_id}", None)
    try:
        snapshot = Path(snapshot_download(hub_id, allow_patterns=list(_FILES)))
    except Exception as error:  # the hub's client raises many kinds, none of them ours
        raise ImportFailed(
            f"{hub_id} could not be fetched from the Hugging Face hub ({_reason(error)}); mend that and run "
            f"`headrace model import {hub_id}` again, or import a directory that you have."
        ) from error
    validate(snapshot)
    for file in sorted(snapshot.iterdir()):
        if file.is_file() and any(file.match(pattern) for pattern in _FILES):
            _share(file.resolve(), directory / file.name)


def _share(file: Path, target: Path) -> None:
    """Give a file a second name; copy it where that is not possible."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def _reason(error: Exception) -> str:
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return "its owner gives access on request: accept the terms on its page and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return "there is no such model, or it is private and HF_TOKEN does not open it"
    if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        return "the hub cannot be reached, or HF_HUB_OFFLINE is set, and its cache on this machine has no copy"
    if isinstance(error, HFValidationError):
        return "the id is not of the form owner/name"
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
