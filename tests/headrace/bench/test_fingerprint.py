"""Guarantees of the fingerprint."""

from __future__ import annotations

import json

import pytest

from headrace.bench import fingerprint


def test_settings_are_those_that_can_change_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of environment and options, the options first; no secret, no place."""
    monkeypatch.setenv("HEADRACE_ENGINE_BLOCK_SIZE", "8")
    monkeypatch.setenv("HEADRACE_ENGINE_MAX_NUM_SEQS", "16")
    for name in (
        "GATEWAY_ADMIN_TOKEN",
        "REDIS_URL",
        "GATEWAY_CACHE_SALT_KEY",
        "GATEWAY_PORT",
        "CACHE",
        "GATEWAY_KEYS_FILE",
    ):
        monkeypatch.setenv(f"HEADRACE_{name}", "secret")
    found = fingerprint.settings({"HEADRACE_ENGINE_MAX_NUM_SEQS": "32"})
    assert found["HEADRACE_ENGINE_BLOCK_SIZE"] == "8"
    assert found["HEADRACE_ENGINE_MAX_NUM_SEQS"] == "32"
    assert "secret" not in found.values()


def test_this_machine_and_these_versions_are_the_same_twice() -> None:
    """Plain values that survive JSON."""
    for part in (fingerprint.hardware, fingerprint.versions):
        once = part()
        assert json.loads(json.dumps(once)) == part()
    assert fingerprint.versions().keys() >= {"python", "numpy", "grpcio", "code"}
    assert fingerprint.hardware()["cores"] >= 1
