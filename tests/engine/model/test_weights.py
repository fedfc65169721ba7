"""Weights are checked by name, shape and file before any is used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.engine.model.config import ModelError
from tests.engine.factories import finish_all, make_engine, make_request, tiny_config, write_model

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path, tiny_config())


def _rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    tensors: dict[str, torch.Tensor | None] = {**load_file(path / "model.safetensors"), **changes}
    save_file({n: t for n, t in tensors.items() if t is not None}, path / "model.safetensors")


def test_a_missing_tensor_is_named(model: Path) -> None:
    """The first missing tensor is in the message."""
    _rewrite(model, **{NAME: None})
    with pytest.raises(ModelError, match=f"{NAME} is missing"):
        make_engine(model)


def test_an_unexpected_tensor_is_named(model: Path) -> None:
    """A tensor that the configuration does not explain is an error, not silence."""
    _rewrite(model, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    with pytest.raises(ModelError, match=r"model\.safetensors: tensor .*q_proj\.bias is unexpected"):
        make_engine(model)


def test_a_misshaped_tensor_is_named_with_both_shapes(model: Path) -> None:
    """Found and expected shape are in the message."""
    _rewrite(model, **{NAME: torch.zeros(80, 47)})
    with pytest.raises(ModelError, match=rf"{NAME} has shape \(80, 47\); \(80, 48\) was expected"):
        make_engine(model)


def test_an_integer_tensor_is_refused(model: Path) -> None:
    """Quantised weights are not read as numbers."""
    _rewrite(model, **{NAME: torch.zeros(80, 48, dtype=torch.int8)})
    with pytest.raises(ModelError, match=f"{NAME} is of type I8"):
        make_engine(model)


@pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
def test_a_truncated_file_is_named(model: Path, keep: int) -> None:
    """Cut anywhere, the file is named and nothing is served."""
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: broken or truncated"):
        make_engine(model)


def test_absent_weights_are_named(model: Path) -> None:
    """The directory and the two possible names are in the message."""
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        make_engine(model)


def test_a_broken_index_and_a_missing_shard_are_named(model: Path) -> None:
    """The index must be an object with a weight_map; a shard that it names must exist."""
    index = model / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json"):
        make_engine(model)
    tensors = load_file(model / "model.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "part-2.safetensors")}))
    with pytest.raises(ModelError, match=r"part-2\.safetensors: the file is missing"):
        make_engine(model)


def test_an_unused_head_beside_tied_embeddings_is_ignored(tmp_path: Path) -> None:
    """Some files carry lm_head although the embeddings are tied."""
    path = write_model(tmp_path, tiny_config(tie_word_embeddings=True))
    before = finish_all(make_engine(path), make_request())
    _rewrite(path, **{"lm_head.weight": torch.zeros(97, 48)})
    assert finish_all(make_engine(path), make_request()) == before
