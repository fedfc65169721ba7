"""What cannot be served is said in one line, with a non-zero exit code, within seconds, and is never served."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.redis_server import RedisServer

SECONDS = 20  # a bound for a loaded machine; a few seconds when it is idle


def start(service, **environ):
    """Runs one process to its end: exit code and what it said."""
    variables = {f"HEADRACE_{name}": str(value) for name, value in environ.items()}
    variables |= {f"HEADRACE_{service.upper()}_PORT": "0"}
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", f"services.{service}"],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert time.monotonic() - began < SECONDS
    assert "Traceback" not in done.stderr, done.stderr
    assert "serving" not in done.stderr
    return done.returncode, done.stderr


@pytest.fixture
def broken(default_model_dir, tmp_path):
    """A copy of the model that a test breaks; the weights are a link."""
    directory = tmp_path / "model"
    directory.mkdir()
    for path in default_model_dir.iterdir():
        if path.suffix == ".safetensors":
            (directory / path.name).symlink_to(path.resolve())
        else:
            shutil.copy(path, directory / path.name)
    return directory


def edit(path, **changes):
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**values, **changes}), encoding="utf-8")


@pytest.mark.parametrize("service", ["engine", "tokenizer", "stream"])
def test_an_unknown_model(service):
    """The name, and the command that mends it."""
    code, said = start(service, MODEL="no-such-model")
    assert code == 1
    assert "no-such-model" in said
    assert "headrace model import" in said


def test_truncated_weights(broken):
    """The file, and that it is cut short."""
    weights = broken / "model.safetensors"
    source = weights.resolve()
    weights.unlink()
    with source.open("rb") as whole:
        weights.write_bytes(whole.read(1_000_000))
    code, said = start("engine", MODEL=broken)
    assert code == 1
    assert "model.safetensors" in said


def test_missing_weights(broken):
    """The file that is not there."""
    (broken / "model.safetensors").unlink()
    code, said = start("engine", MODEL=broken)
    assert code == 1
    assert "safetensors" in said


def test_weights_of_another_shape(broken):
    """The tensor, its shape and the expected one."""
    edit(broken / "config.json", intermediate_size=1500)
    code, said = start("engine", MODEL=broken)
    assert code == 1
    assert "1500" in said
    assert "model.safetensors" in said


def test_an_unsupported_architecture(broken):
    """The field, and what is supported."""
    edit(broken / "config.json", architectures=["MambaForCausalLM"])
    code, said = start("engine", MODEL=broken)
    assert code == 1
    assert "Mamba" in said
    assert "LlamaForCausalLM" in said


def test_a_config_that_is_not_json(broken):
    """The file."""
    (broken / "config.json").write_text("{", encoding="utf-8")
    code, said = start("engine", MODEL=broken)
    assert code == 1
    assert "config.json" in said


@pytest.mark.parametrize("service", ["tokenizer", "stream"])
def test_a_broken_tokenizer(broken, service):
    """The file."""
    (broken / "tokenizer.json").write_text('{"model": 3}', encoding="utf-8")
    code, said = start(service, MODEL=broken)
    assert code == 1
    assert "tokenizer.json" in said


def test_a_tokenizer_of_another_model(broken):
    """More tokens than the model has embeddings."""
    edit(broken / "config.json", vocab_size=1000)
    code, said = start("tokenizer", MODEL=broken)
    assert code == 1
    assert "1000" in said


@pytest.mark.parametrize(
    ("variable", "value", "wanted"),
    [
        ("ENGINE_DTYPE", "int7", "expected one of auto, float32, bfloat16"),
        ("ENGINE_KV_BLOCKS", "-3", "a whole number of at least 1"),
        ("ENGINE_BLOCK_SIZE", "17", "block_size"),
        ("ENGINE_MAX_NUM_SEQ", "4", "no such setting"),
        ("ENGINE_MAX_NUM_BATCHED_TOKENS", "8", "max_num_batched_tokens"),
        ("ENGINE_MAX_MODEL_LEN", "1e9", "a whole number"),
        ("ENGINE_NUM_SPECULATIVE_TOKENS", "-1", "a whole number"),
    ],
)
def test_a_bad_setting(variable, value, wanted):
    """The variable, the value and what was expected."""
    code, said = start("engine", **{variable: value})
    assert code == 1
    assert variable.removeprefix("ENGINE_").lower() in said.lower()
    assert wanted in said


@pytest.mark.parametrize("service", ["gateway", "stream", "engine"])
def test_a_wrong_password_of_redis(service, locked_redis):
    """Every process that uses Redis says so before anything else, without the password."""
    settings = {"REDIS_URL": locked_redis.url.replace(locked_redis.password, "wrong-and-secret")}
    if service == "engine":
        settings["ENGINE_ADVERTISE"] = "engine:50053"
    code, said = start(service, **settings)
    assert code == 1
    (line,) = [line for line in said.splitlines() if "cannot go on" in line]
    assert f"HEADRACE_REDIS_URL: Redis at 127.0.0.1:{locked_redis.port} does not take the password" in line
    assert "secret" not in said


@pytest.fixture(scope="module")
def locked_redis():
    server = RedisServer("right-and-secret")
    yield server
    server.close()


@pytest.mark.parametrize("service", ["gateway", "tokenizer", "stream", "engine"])
def test_an_unreadable_certificate(service, tmp_path):
    """The variable, the file and the reason, for what is shown to callers and to peers alike."""
    section = service.upper()
    files = {f"{section}_TLS_CERTIFICATE": tmp_path, f"{section}_TLS_KEY": tmp_path, "PEERS_TLS_CA": tmp_path / "none"}
    code, said = start(service, **files)
    assert code == 1
    assert said.splitlines() == [
        f"headrace {service}: HEADRACE_{section}_TLS_CERTIFICATE={tmp_path}: cannot be read (Is a directory)",
        f"headrace {service}: HEADRACE_PEERS_TLS_CA={tmp_path / 'none'}: cannot be read (No such file or directory)",
    ]
