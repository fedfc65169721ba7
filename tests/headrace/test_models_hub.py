"""A model of the hub is fetched through the hub's own cache, which is enough where there is no network."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.models import ImportFailed, ModelBroken, ModelNotFound, import_model, list_models, models_dir, resolve
from tests.headrace.fake_models import write_model

hub = pytest.importorskip("huggingface_hub")

COMMIT = "0" * 40


@pytest.fixture(autouse=True)
def _own_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both caches below the test's directory, and the hub client told to use no network."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)


def cache_model(tmp_path: Path, hub_id: str, **changes: Any) -> Path:
    """Write the hub client's cache as it lies on disk: blobs, and a snapshot of links to them."""
    repository = tmp_path / "hub" / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    blobs = write_model(repository / "blobs", **changes)
    snapshot.mkdir(parents=True)
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def failing(monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception]) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error()

    monkeypatch.setattr(hub, "snapshot_download", refuse)


def test_a_cached_model_needs_no_network_and_no_second_copy(tmp_path: Path) -> None:
    snapshot = cache_model(tmp_path, "owner/Thing-1B")
    stored = import_model("owner/Thing-1B")
    assert stored == resolve("thing-1b") == resolve("owner/Thing-1B") == import_model("owner/Thing-1B")
    assert not (stored / "model.safetensors").is_symlink()
    assert (stored / "model.safetensors").samefile(snapshot / "model.safetensors")
    with pytest.raises(ModelNotFound, match="headrace model import other/Thing-1B"):
        resolve("other/Thing-1B")


def test_another_file_system_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    snapshot = cache_model(tmp_path, "owner/thing")
    monkeypatch.setattr(os, "link", refuse)
    stored = import_model("owner/thing") / "model.safetensors"
    assert stored.read_bytes() == (snapshot / "model.safetensors").read_bytes()
    assert not stored.samefile(snapshot / "model.safetensors")


def test_an_incomplete_cache_names_the_file_in_it(tmp_path: Path) -> None:
    snapshot = cache_model(tmp_path, "owner/thing")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(ModelBroken, match=f"{COMMIT} holds neither model.safetensors"):
        import_model("owner/thing")
    assert [entry.name for entry in models_dir().iterdir()] == [".thing.lock"]


def test_no_network_and_no_cache_is_one_sentence_with_the_command() -> None:
    with pytest.raises(ImportFailed, match=r"cannot be reached.*`headrace model import owner/thing`") as caught:
        import_model("owner/thing")
    assert "\n" not in str(caught.value)
    assert list_models() == []


@pytest.mark.parametrize(
    ("kind", "said"), [("RepositoryNotFoundError", "no such model"), ("GatedRepoError", "accept the terms")]
)
def test_the_hub_s_refusals_say_what_to_do(monkeypatch: pytest.MonkeyPatch, kind: str, said: str) -> None:
    refusal = getattr(hub.errors, kind)
    failing(monkeypatch, lambda: refusal.__new__(refusal, "long\nstory"))  # made without the HTTP response it wraps
    with pytest.raises(ImportFailed, match=said):
        import_model("owner/thing")


def test_any_other_failure_is_told_by_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, lambda: OSError("disk on fire\nlong story"))
    with pytest.raises(ImportFailed, match=r"\(disk on fire\).*`headrace model import owner/thing`"):
        import_model("owner/thing")
