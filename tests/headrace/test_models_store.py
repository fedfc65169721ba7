"""The store finds whole models, lists broken ones with their reason, and says what would mend it."""

import json
import shutil
from pathlib import Path

import pytest

from headrace.models import (
    DEFAULT_MODEL,
    ModelBroken,
    ModelError,
    ModelNotFound,
    cache_dir,
    list_models,
    models_dir,
    resolve,
    validate,
)
from headrace.models.store import check_name
from tests.headrace.fake_models import write_model, write_weights


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


def test_the_cache_is_headrace_cache_then_xdg_then_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the three that is set wins; an empty variable counts as unset."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HEADRACE_CACHE", "/own")
    assert cache_dir() == Path("/own")
    monkeypatch.setenv("HEADRACE_CACHE", "")
    assert cache_dir() == Path("/xdg/headrace")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "headrace"


def test_a_stored_name_and_a_directory_both_resolve(tmp_path: Path) -> None:
    stored = write_model(models_dir() / "tiny")
    elsewhere = write_model(tmp_path / "elsewhere")
    assert resolve("tiny") == stored
    assert resolve(elsewhere) == resolve(str(elsewhere)) == elsewhere


def test_an_unknown_name_says_what_is_stored_and_how_to_import() -> None:
    write_model(models_dir() / "tiny")
    with pytest.raises(ModelNotFound, match=r"'nothere'.*stored: tiny.*`headrace model import nothere`"):
        resolve("nothere")


def test_a_missing_default_model_names_the_command() -> None:
    with pytest.raises(ModelNotFound, match="`headrace model import`"):
        resolve(DEFAULT_MODEL)


@pytest.mark.parametrize("name", ["../etc", "/etc/none", "a/b", ".hidden", ""])
def test_a_name_never_leaves_the_store(name: str) -> None:
    with pytest.raises(ModelError, match="cannot name a stored model"):
        check_name(name)


def test_a_directory_without_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        resolve(tmp_path)


def test_a_dangling_link_names_what_is_gone(tmp_path: Path) -> None:
    original = write_model(tmp_path / "original")
    models_dir().mkdir(parents=True)
    (models_dir() / "linked").symlink_to(original)
    assert resolve("linked") == original
    shutil.rmtree(original)
    with pytest.raises(ModelBroken, match="original"):
        resolve("linked")
    assert "original" in list_models()[0].problem


@pytest.mark.parametrize("content", ["", "{", "[]", "\xff"])
def test_a_broken_config_is_named(tmp_path: Path, content: str) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelBroken, match=r"config\.json"):
        resolve(tmp_path)


def test_listing_shows_size_architecture_dtype_context_and_problems() -> None:
    write_model(models_dir() / "good")
    write_model(models_dir() / "cut", weights_cut_bytes=1)
    (models_dir() / ".good.lock").touch()
    cut, good = list_models()
    assert (good.name, good.architecture, good.dtype, good.context) == (
        "good",
        "LlamaForCausalLM",
        "bfloat16",
        128,
    )
    assert good.size_bytes > 128
    assert good.problem == ""
    assert cut.name == "cut"
    assert "model.safetensors" in cut.problem


def test_an_empty_store_lists_nothing() -> None:
    assert list_models() == []


@pytest.mark.parametrize("cut_bytes", [1, 128, 150, 10_000])
def test_truncated_weights_are_found_without_reading_them(tmp_path: Path, cut_bytes: int) -> None:
    write_model(tmp_path, weights_cut_bytes=cut_bytes)
    with pytest.raises(ModelBroken, match=r"model\.safetensors"):
        validate(tmp_path)


def test_a_file_that_is_not_safetensors_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 3)
    with pytest.raises(ModelBroken, match="safetensors header"):
        validate(tmp_path)


def test_every_shard_of_an_index_must_be_there_and_whole(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelBroken, match="neither"):
        validate(tmp_path)
    index = {"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    write_weights(tmp_path / "model-1.safetensors")
    with pytest.raises(ModelBroken, match=r"model-2\.safetensors is missing"):
        validate(tmp_path)
    write_weights(tmp_path / "model-2.safetensors", cut_bytes=3)
    with pytest.raises(ModelBroken, match=r"model-2\.safetensors is \d+ bytes long"):
        validate(tmp_path)
    write_weights(tmp_path / "model-2.safetensors")
    assert validate(tmp_path)["vocab_size"] == 16


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({"architectures": None}, "architectures"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"hidden_size": "4"}, "hidden_size"),
    ],
)
def test_a_config_that_cannot_be_served_says_why(tmp_path: Path, change: dict[str, object], said: str) -> None:
    write_model(tmp_path, **change)
    with pytest.raises(ModelBroken, match=said):
        validate(tmp_path)


def test_the_real_default_model_is_whole(default_model_dir: Path) -> None:
    assert validate(default_model_dir)["max_position_embeddings"] == 8192
