"""Import, then serve: the engine's greedy ids are those of `transformers`, for every family and way of storing it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from headrace.models import ModelBroken, import_model, list_models
from tests.headrace.gguf_models import FAMILIES, tiny_model
from tests.headrace.test_models_gguf import greedy, served


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))


def save(model: Any, directory: Path, **options: Any) -> Path:
    """What `transformers` saves of a model, and a tokenizer.json of one token a id."""
    model.save_pretrained(directory, **options)
    vocabulary = {f"t{place}": place for place in range(model.config.vocab_size)}
    Tokenizer(models.WordLevel(vocabulary, unk_token="t0")).save(str(directory / "tokenizer.json"))
    return directory


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_directory_in_shards_is_served_as_it_is(tmp_path: Path, family: str, tied: bool) -> None:
    """Every family, rotary scaling and bias, embeddings tied and not, in several safetensors files."""
    model = tiny_model(family, tie_word_embeddings=tied)
    source = save(model, tmp_path / family, max_shard_size="700KB")
    assert len(list(source.glob("model-*-of-*.safetensors"))) > 1
    stored = import_model(source)
    assert served(stored) == greedy(model)
    assert list_models()[0].problem == ""


def test_a_single_file_is_served_as_its_shards_are(tmp_path: Path) -> None:
    model = tiny_model("llama3")
    assert served(import_model(save(model, tmp_path / "single"))) == greedy(model)


def test_tied_embeddings_saved_twice_are_read_once(tmp_path: Path) -> None:
    """Some writers store lm_head beside the embeddings that it is tied to."""
    model = tiny_model("qwen2-tied")
    source = save(model, tmp_path / "twice")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors")
    assert served(import_model(source)) == greedy(model)


def test_a_missing_shard_is_named_before_anything_is_linked(tmp_path: Path) -> None:
    source = save(tiny_model("llama"), tmp_path / "shards", max_shard_size="700KB")
    (source / sorted(file.name for file in source.glob("model-*"))[1]).unlink()
    with pytest.raises(ModelBroken, match=r"model-00002-of-0\d+\.safetensors is missing"):
        import_model(source)
    assert list_models() == []
