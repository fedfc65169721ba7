"""A configuration is read whole or refused by file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.engine.model.config import ModelError, load_config
from tests.engine.factories import tiny_config


def _write(path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["GPT2LMHeadModel"]),
        ("architectures", []),
        ("hidden_size", 0),
        ("hidden_size", "48"),
        ("num_hidden_layers", None),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("hidden_act", "gelu"),
        ("mlp_bias", True),
        ("attention_bias", "no"),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", -1.0),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
        ("rope_scaling", {"rope_type": "llama3"}),
        ("torch_dtype", "int8"),
        ("quantization_config", {"bits": 4}),
        ("eos_token_id", 97),
        ("max_position_embeddings", None),
    ],
)
def test_a_bad_field_is_named(tmp_path: Path, field: str, value: Any) -> None:
    """The message names config.json and the field."""
    _write(tmp_path, tiny_config(**{field: value}))
    with pytest.raises(ModelError, match=r"config\.json") as error:
        load_config(tmp_path)
    expected = "factor" if value == {"rope_type": "llama3"} else "rope_type" if field == "rope_scaling" else field
    assert expected in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_broken_json_is_named(tmp_path: Path, text: str) -> None:
    """Not JSON, or not an object: the file is named."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    """No directory, no config.json: the path is named."""
    with pytest.raises(ModelError, match="no such directory"):
        load_config(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"config\.json: the file is missing"):
        load_config(tmp_path)


def test_end_of_sequence_ids_come_from_generation_config_first(tmp_path: Path) -> None:
    """A list there wins; config.json is the fallback."""
    assert load_config(_write(tmp_path, tiny_config())).eos_token_ids == {2}
    assert load_config(_write(tmp_path, tiny_config(), {})).eos_token_ids == {2}
    assert load_config(_write(tmp_path, tiny_config(), {"eos_token_id": [3, 5]})).eos_token_ids == {3, 5}


def test_the_context_is_max_position_embeddings_cut_to_a_sliding_window(tmp_path: Path) -> None:
    """Inside one window a sliding window changes nothing, so the context ends there."""
    assert load_config(_write(tmp_path, tiny_config())).context_length == 512
    mistral = tiny_config("MistralForCausalLM", sliding_window=128)
    assert load_config(_write(tmp_path, mistral)).context_length == 128
