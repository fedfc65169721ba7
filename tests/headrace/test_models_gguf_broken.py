"""A GGUF file that cannot be imported is refused in one sentence that names it, and leaves nothing behind."""

import random
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from headrace.models import ImportFailed, import_model, models_dir
from headrace.models.gguf.convert import convert
from headrace.models.gguf.file import read_header
from tests.headrace.gguf_models import tiny_model, write_gguf


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "m.gguf"
    write_gguf(path, tiny_model("llama3", num_hidden_layers=1), "llama3", Kind.Q4_K)
    return path.read_bytes()


def refused(tmp_path: Path, content: bytes) -> str:
    """Convert `content`; return the refusal, which must be one sentence with the file's name."""
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    (out := tmp_path / "out").mkdir(exist_ok=True)
    with pytest.raises(ImportFailed) as caught:
        convert(path, out)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def changed(tmp_path: Path, family: str = "llama", **options: Any) -> str:
    """The refusal of a tiny model's file written with other metadata, or with tensors left out."""
    write_gguf(tmp_path / "m.gguf", tiny_model(family, num_hidden_layers=1), family, **options)
    return refused(tmp_path, (tmp_path / "m.gguf").read_bytes())


def test_a_file_cut_anywhere_is_refused(tmp_path: Path, whole: bytes) -> None:
    """Inside the header and inside the weights alike."""
    header = len(whole) - 300_000
    for length in [*range(0, 60, 3), *range(60, header, header // 60), len(whole) - 40_000, len(whole) - 1]:
        said = refused(tmp_path, whole[:length])
        assert re.search("cut off|is empty|does not start", said), said


def test_damaged_bytes_are_refused_or_harmless(tmp_path: Path, whole: bytes) -> None:
    """Whatever a damaged header says, nothing but ImportFailed comes of it, and it is soon over."""
    rng = random.Random(1)
    path = tmp_path / "m.gguf"
    (out := tmp_path / "out").mkdir()
    header = min(info.start for info in _tensors(tmp_path, whole))
    refusals = 0
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            content[rng.randrange(4, header)] = rng.randrange(256)
        path.write_bytes(content)
        try:
            convert(path, out)
        except ImportFailed:
            refusals += 1
    assert refusals > 75


def _tensors(tmp_path: Path, content: bytes) -> list[Any]:
    (tmp_path / "m.gguf").write_bytes(content)
    return list(read_header(tmp_path / "m.gguf").tensors.values())


@pytest.mark.parametrize(
    ("place", "written", "said"),
    [
        (0, b"GGML", "does not start with the letters GGUF"),
        (4, struct.pack("<I", 1), "of GGUF version 1; expected 2 or 3"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 1 << 60), "is damaged"),  # tensors
        (16, struct.pack("<Q", 1 << 60), "cut off or damaged"),  # metadata entries
    ],
)
def test_wrong_first_bytes_say_what_was_expected(
    tmp_path: Path, whole: bytes, place: int, written: bytes, said: str
) -> None:
    assert said in refused(tmp_path, whole[:place] + written + whole[place + len(written) :])


@pytest.mark.parametrize(("code", "name"), [(16, "IQ2_XXS"), (34, "TQ1_0"), (999, "number 999")])
def test_an_unknown_quantisation_is_named_with_the_known_ones(
    tmp_path: Path, whole: bytes, code: int, name: str
) -> None:
    """The type is the word after name, dimensions and shape of a tensor's description."""
    at = whole.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 16
    said = refused(tmp_path, whole[:at] + struct.pack("<I", code) + whole[at + 4 :])
    assert f"tensor blk.0.attn_q.weight in quantisation {name}; expected one of F32, F16" in said


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, whole: bytes) -> None:
    start = next(info.start for info in _tensors(tmp_path, whole) if info.name == "output_norm.weight")
    said = refused(tmp_path, whole[:start] + b"\xff\xff\xff\x7f" + whole[start + 4 :])
    assert "tensor output_norm.weight holds values that are no finite numbers" in said


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.architecture": "mamba"}, "architecture 'mamba'; expected one of llama, qwen2, qwen3"),
        ({"llama.block_count": 3}, "lacks the tensor blk.2.attn_norm.weight; expected 3 layers"),
        ({"llama.block_count": 4_000_000_000}, "expected 4000000000 layers"),
        ({"llama.embedding_length": None}, "lacks llama.embedding_length; expected a positive integer"),
        ({"llama.feed_forward_length": 512}, r"ffn_gate.weight of shape (256, 256); its metadata promises (512, 256)"),
        ({"llama.attention.head_count_kv": 3}, "4 heads, 3 key/value heads"),
        ({"llama.rope.dimension_count": 32, "llama.attention.key_length": 64}, "rotates 32 of 64 dimensions"),
        ({"llama.rope.scaling.type": "yarn"}, "scales rotary positions by 'yarn'"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "lacks llama.attention.layer_norm_rms_epsilon"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"tokenizer.ggml.model": None}, "lacks tokenizer.ggml.model; expected a text"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer of kind 'bert'; expected one of gpt2, llama"),
        ({"tokenizer.ggml.pre": None}, "lacks tokenizer.ggml.pre"),
        ({"tokenizer.ggml.pre": "jais"}, "splits words by 'jais'"),
        ({"tokenizer.ggml.tokens": None}, "lacks tokenizer.ggml.tokens; expected a list of str"),
        ({"tokenizer.ggml.token_type": None}, "lacks tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "288 tokens, 2 token types and 288 embeddings"),
        ({"tokenizer.ggml.tokens": ["a"] * 288}, "tokens twice"),
        ({"tokenizer.ggml.merges": None}, "lacks tokenizer.ggml.merges"),
        ({"tokenizer.ggml.merges": ["h e", "q x y"]}, "merges that do not fit its tokens"),
        ({"tokenizer.ggml.merges": ["q x"]}, "merges that do not fit its tokens"),
        ({"tokenizer.ggml.eos_token_id": None}, "lacks tokenizer.ggml.eos_token_id"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "eos_token_id = 5000; expected an id below 262"),
        ({"tokenizer.ggml.model": "llama"}, "lacks tokenizer.ggml.scores"),
    ],
)
def test_wrong_metadata_is_named_with_what_was_expected(tmp_path: Path, metadata: dict[str, Any], said: str) -> None:
    assert said in changed(tmp_path, metadata=metadata)


def test_missing_and_foreign_tensors_are_named(tmp_path: Path) -> None:
    assert "lacks the tensor blk.0.ffn_up.weight" in changed(tmp_path, drop=("blk.0.ffn_up.weight",))
    assert "lacks the tensor blk.0.attn_q.bias" in changed(tmp_path, "qwen2", drop=("blk.0.attn_q.bias",))
    assert "lacks the tensor token_embd.weight" in changed(tmp_path, drop=("token_embd.weight",))
    metadata = {"general.architecture": "qwen2"} | _renamed("llama", "qwen2")
    assert "lacks the tensor blk.0.attn_q.bias" in changed(tmp_path, metadata=metadata)
    metadata = {"general.architecture": "llama"} | _renamed("qwen3", "llama")
    assert "has a tensor blk.0.attn_q_norm.weight" in changed(tmp_path, "qwen3", metadata=metadata)


def _renamed(old: str, new: str) -> dict[str, Any]:
    """The tiny model's metadata under another architecture's names."""
    keys: dict[str, Any] = {"context_length": 256, "embedding_length": 256, "block_count": 1}
    keys |= {"feed_forward_length": 256, "attention.head_count": 4, "attention.head_count_kv": 2}
    keys |= {"attention.layer_norm_rms_epsilon": 1e-5}
    keys |= {"attention.key_length": 128} if old == "qwen3" else {}
    return {f"{new}.{key}": value for key, value in keys.items()}


def test_a_refused_import_leaves_nothing(tmp_path: Path, whole: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the real process: the sentence arrives as it is, and the store holds nothing."""
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "m.gguf"
    path.write_bytes(whole[:-1])
    with pytest.raises(ImportFailed, match=rf"^{path} is cut off: it is \d+ bytes long and tensor .*fetch it again\.$"):
        import_model(path)
    assert [entry.name for entry in models_dir().iterdir()] == [".m.lock"]
    assert path.exists()
