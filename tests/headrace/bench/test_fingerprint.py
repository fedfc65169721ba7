"""Guarantees of the fingerprint."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.bench import fingerprint
from headrace.v1 import gateway_pb2


def test_settings_are_those_that_can_change_a_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of environment and options, the options first; of the configuration file a digest; no secret, no place."""
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)
    kept_out = ("GATEWAY_ADMIN_TOKEN", "REDIS_URL", "GATEWAY_CACHE_SALT_KEY", "GATEWAY_PORT", "CACHE", "MODEL")
    for name in (*kept_out, "GATEWAY_KEYS_FILE", "GATEWAY_ENGINE_ADDRESSES"):
        monkeypatch.setenv(f"HEADRACE_{name}", "secret")
    file = tmp_path / "config.toml"
    file.write_text("[engine]\nkv_blocks = 64\n")
    monkeypatch.setenv("HEADRACE_CONFIG", str(file))
    monkeypatch.setenv("HEADRACE_ENGINE_PREFIX_CACHE", "false")
    monkeypatch.setenv("HEADRACE_ENGINE_MAX_NUM_SEQS", "16")
    first = fingerprint.settings({"HEADRACE_ENGINE_MAX_NUM_SEQS": "32"})
    digest = first.pop("HEADRACE_CONFIG")
    assert first == {"HEADRACE_ENGINE_MAX_NUM_SEQS": "32", "HEADRACE_ENGINE_PREFIX_CACHE": "false"}
    file.write_text("[engine]\nkv_blocks = 65\n")
    assert fingerprint.settings({})["HEADRACE_CONFIG"] != digest


def test_the_model_is_told_with_its_quantization() -> None:
    """Runs of one model in other number formats are not runs of the same."""
    facts = {"architecture": "A", "dtype": "bfloat16", "context_length": 9}
    plain = fingerprint.described(gateway_pb2.Model(**facts, quantization="none"))
    assert plain == fingerprint.described(gateway_pb2.Model(**facts)) == "A, bfloat16, 9 tokens"
    assert fingerprint.described(gateway_pb2.Model(**facts, quantization="int8")) == "A, bfloat16, int8, 9 tokens"
    assert fingerprint.described(gateway_pb2.Model(**facts, kv_cache_dtype="bfloat16")) == plain
    assert fingerprint.described(gateway_pb2.Model(**facts, kv_cache_dtype="int8")) == "A, bfloat16, KV int8, 9 tokens"


def test_this_machine_and_these_versions_are_the_same_twice() -> None:
    """Plain values that survive JSON."""
    for part in (fingerprint.hardware, fingerprint.versions):
        once = part()
        assert json.loads(json.dumps(once)) == part()
    assert fingerprint.versions().keys() >= {"python", "numpy", "grpcio", "code"}
    assert fingerprint.hardware()["cores"] >= 1
