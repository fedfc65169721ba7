"""A GGUF file of any family and quantisation is served as the model that it stands for."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.cli import __main__ as command
from headrace.models import validate
from headrace.models.gguf import rope
from headrace.models.gguf.convert import convert
from headrace.models.gguf.file import READABLE, read_header
from headrace.models.gguf.weights import write_weights
from tests.engine.factories import finish_all, make_engine, make_request
from tests.headrace.gguf_models import FAMILIES, K_BLOCKS, tiny_model, write_gguf

PROMPT = [5, 200, 17, 3, 99, 42, 254, 1, 120, 77, 31, 8]
NAMED_IN_THE_ISSUE = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return result


def greedy(model: Any, count: int = 12) -> list[int]:
    """Greedy ids of `transformers`, whatever ends an answer."""
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def served(directory: Path, count: int = 12) -> list[int]:
    """Greedy ids of our engine."""
    engine = make_engine(directory)
    return finish_all(engine, make_request(1, PROMPT, max_tokens=count))[1]


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_what_the_source_computes(tmp_path: Path, family: str, kind: str) -> None:
    """Logits within 1e-4 of the source with the file's weights, and the engine's greedy ids are its greedy ids."""
    source = tiny_model(family)
    source.load_state_dict(write_gguf(tmp_path / "m.gguf", source, family, Kind[kind]))
    (out := tmp_path / "out").mkdir()
    convert(tmp_path / "m.gguf", out, torch.float32)
    config = validate(out)
    imported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert (logits(imported) - logits(source)).abs().max() < 1e-4
    assert served(out) == greedy(source)
    assert config["tie_word_embeddings"] == source.config.tie_word_embeddings
    architecture = "LlamaForCausalLM" if family == "mistral" else type(source).__name__  # the file says llama
    assert config["architectures"] == [architecture]


@pytest.mark.parametrize("kind", [kind for kind in READABLE if kind != "IQ4_NL"])  # which gguf cannot write
def test_every_quantisation_is_unpacked_exactly(tmp_path: Path, kind: str) -> None:
    """Each weight is the file's, rounded once to bfloat16; a file of F32 alone stays float32."""
    source = tiny_model("llama", num_hidden_layers=1)
    weights = write_gguf(tmp_path / "m.gguf", source, "llama", Kind[kind])
    (out := tmp_path / "out").mkdir()
    convert(tmp_path / "m.gguf", out)
    dtype = torch.float32 if kind == "F32" else torch.bfloat16
    found = load_file(out / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor.to(dtype)), name


def test_all_that_the_documentation_names_is_readable() -> None:
    assert set(NAMED_IN_THE_ISSUE) <= set(READABLE)


def _block(kind: Kind) -> tuple[bytes, list[float]]:
    """A block written by hand, and its 256 values by the format's description."""
    one = np.array([1.0], np.float16).tobytes()
    half = np.array([0.5], np.float16).tobytes()
    six_bit = bytes([2] * 4 + [3] * 4 + [0x32] * 4)  # eight scales of 2, eight minima of 3
    ramp = 0b11100100  # quants 0, 1, 2, 3, each for 32 values
    quarters = [float(quant) for _ in range(2) for quant in range(4) for _ in range(32)]
    nibbles = [value for _ in range(4) for value in [1.0 * 2 - 1.5] * 32 + [5.0 * 2 - 1.5] * 32]
    return {
        Kind.Q2_K: (bytes([0x21] * 16 + [ramp] * 64) + one + one, [value - 2 for value in quarters]),
        Kind.Q3_K: (bytes([0] * 32 + [ramp] * 64 + [0x11] * 8 + [0xAA] * 4) + one, [v - 4 for v in quarters]),
        Kind.Q4_K: (one + half + six_bit + bytes([0x51] * 128), nibbles),
        Kind.Q5_K: (one + half + six_bit + bytes([0xFF] * 32 + [0x51] * 128), [v + 32 for v in nibbles]),
        Kind.Q6_K: (bytes([0x21] * 128 + [0] * 64 + [2] * 16) + one, ([-62.0] * 64 + [-60.0] * 64) * 2),
    }[kind]


@pytest.mark.parametrize("kind", K_BLOCKS, ids=lambda kind: kind.name)
def test_k_quants_mean_what_their_format_says(tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    block, expected = _block(kind)

    def by_hand(tensor: np.ndarray[Any, Any], kind: Kind) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        rows, blocks = tensor.shape[0], tensor.shape[1] // 256
        packed = np.tile(np.frombuffer(block, np.uint8), (rows, blocks))
        return packed, np.tile(np.array(expected, np.float32), (rows, blocks))

    monkeypatch.setattr("tests.headrace.gguf_models.pack", by_hand)
    weights = write_gguf(tmp_path / "m.gguf", tiny_model("qwen2", num_hidden_layers=1), "qwen2", kind)
    (out := tmp_path / "out").mkdir()
    convert(tmp_path / "m.gguf", out, torch.float32)
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_a_large_model_is_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shards serve what the single file serves."""
    source = tiny_model("qwen3")
    write_gguf(tmp_path / "m.gguf", source, "qwen3")
    (out := tmp_path / "out").mkdir()

    def small(*arguments: Any) -> None:
        write_weights(*arguments, shard_bytes=1 << 20)

    monkeypatch.setattr("headrace.models.gguf.convert.write_weights", small)
    convert(tmp_path / "m.gguf", out)
    validate(out)
    assert len(list(out.glob("model-*.safetensors"))) > 2
    assert not (out / "model.safetensors").exists()
    assert served(out) == greedy(source)


@pytest.mark.parametrize(
    ("low", "high", "context", "factor"), [(1.0, 4.0, 8192, 8.0), (1.0, 4.0, 8192, 32.0), (1.5, 3.0, 3000, 2.5)]
)
def test_llama3_scaling_is_recovered_from_its_divisors(low: float, high: float, context: int, factor: float) -> None:
    """Also where its numbers are not Llama's own: any that give the same divisors do."""
    divisors = rope.factors(128, 500000.0, factor, low, high, context).astype(np.float32).astype(np.float64)
    found = rope.recover(divisors, 500000.0)
    assert found is not None
    assert found["factor"] == factor
    if (low, high, context) == (1.0, 4.0, 8192):
        assert list(found.values()) == ["llama3", factor, low, high, context]
    again = rope.factors(128, 500000.0, *(found[key] for key in list(found)[1:]))
    assert np.allclose(again, divisors, rtol=1e-3)


def test_divisors_of_another_scaling_are_not_taken_for_llama3() -> None:
    assert rope.recover(np.linspace(1, 9, 64), 500000.0) is None
    assert rope.recover(np.full(64, np.nan), 500000.0) is None
    assert rope.recover(np.linspace(0.2, 1, 64), 500000.0) is None


def test_the_command_imports_in_a_process_and_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    source = tiny_model("llama3")
    source.load_state_dict(write_gguf(tmp_path / "Tiny.gguf", source, "llama3", Kind.F16))
    assert command.main(["model", "import", str(tmp_path / "Tiny.gguf"), "--json", "-"]) == 0
    stored = Path(json.loads(capsys.readouterr().out)["directory"])
    assert command.main(["model", "list", "--json", "-"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)["models"]
    assert listed.pop("size_bytes") > 1_000_000
    assert listed == {
        "name": "tiny",
        "directory": str(stored),
        "architecture": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "context": 256,
        "problem": "",
    }
    scaling = json.loads((stored / "config.json").read_text())["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 8.0)
    assert len(served(stored, 4)) == 4


def test_the_help_names_families_and_quantisations(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["model", "import", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    missing = [kind for kind in READABLE if not kind.endswith("_K") and kind not in said]
    assert not missing
    assert "Q2_K to" in said
    assert "Qwen3ForCausalLM" in said


def test_the_header_agrees_with_the_package_reader(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("llama3"), "llama3", Kind.Q4_K)
    ours, theirs = read_header(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.kind, info.start, info.size_bytes) == (tensor.tensor_type, tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
