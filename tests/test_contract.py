"""The committed stubs are what protos/ generates, and the contract keeps its rules."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.v1 import admin_pb2, engine_pb2, gateway_pb2, stream_pb2, tokenizer_pb2

ROOT = Path(__file__).parent.parent
PROTOS = sorted((ROOT / "protos" / "headrace" / "v1").glob("*.proto"))
BUF = Path(sys.executable).with_name("buf")


def test_the_stubs_are_up_to_date(tmp_path):
    """Regenerating gives the committed files, byte for byte."""
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}"]
    command += [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run([*command, *map(str, PROTOS)], check=True)
    generated = {path.name: path.read_bytes() for path in (tmp_path / "headrace" / "v1").iterdir()}
    committed = {p.name: p.read_bytes() for p in (ROOT / "headrace" / "v1").glob("*_pb2*") if p.is_file()}
    assert generated.keys() == committed.keys()
    assert [name for name in generated if generated[name] != committed[name]] == []


def test_buf_finds_nothing():
    """Buf's STANDARD and COMMENTS rules hold."""
    result = subprocess.run([BUF, "lint"], cwd=ROOT / "protos", capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_nothing_breaks_the_baseline():
    """No caller of the committed baseline is broken."""
    command = [BUF, "breaking", ROOT / "protos", "--against", ROOT / "protos" / "baseline.binpb"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "")


def test_buf_notices_a_break(tmp_path):
    """The breaking check is not blind: a field that changes its number fails it."""
    for path in PROTOS:
        target = tmp_path / "headrace" / "v1" / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8")
        target.write_text(text.replace("optional int32 max_tokens = 5;", "optional int32 max_tokens = 99;"))
    (tmp_path / "buf.yaml").write_text((ROOT / "protos" / "buf.yaml").read_text(encoding="utf-8"))
    command = [BUF, "breaking", tmp_path, "--against", ROOT / "protos" / "baseline.binpb"]
    assert subprocess.run(command, capture_output=True, check=False).returncode != 0


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.name)
def test_no_unsigned_integers(path):
    """Counts are signed, so that a subtraction in any language is what it seems."""
    assert not re.search(r"\b(uint32|uint64|fixed32|fixed64)\b", path.read_text(encoding="utf-8"))


def test_the_services_are_those_of_the_design():
    """Names of services and calls: a client in any language depends on them."""
    services = {
        service.name: [method.name for method in service.methods]
        for module in (gateway_pb2, admin_pb2, tokenizer_pb2, stream_pb2, engine_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    }
    assert services["GatewayService"] == [
        "Generate",
        "GenerateStream",
        "GenerateSession",
        "Tokenize",
        "Detokenize",
        "ListModels",
        "GetStats",
    ]
    assert services["TokenizerService"] == ["Encode", "Decode", "GetVocabulary"]
    assert services["StreamService"] == ["Deliver"]
    assert services["EngineService"][:3] == ["Attach", "GetEngine", "GetStats"]
    assert "AdminService" in services
