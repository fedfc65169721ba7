"""The detokenizer's texts, put together, are what `decode` says of all the ids, however the ids are split."""

import random
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from services.stream.detokenizer import (
    ByteLevelDetokenizer,
    DetokenizerFactory,
    PieceDetokenizer,
    WindowDetokenizer,
)
from services.stream.token_table import TokenTable, byte_level_alphabet


@cache
def load(directory: Path) -> tuple[Tokenizer, DetokenizerFactory]:
    return Tokenizer.from_file(str(directory / "tokenizer.json")), DetokenizerFactory.load(directory)


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> Tokenizer:
    return load(default_model_dir)[0]


@pytest.fixture(scope="module")
def factory(default_model_dir: Path) -> DetokenizerFactory:
    return load(default_model_dir)[1]


def run(factory: DetokenizerFactory, pieces: Iterable[Sequence[int]]) -> str:
    detokenizer = factory.new()
    return "".join(detokenizer.push(piece) for piece in pieces) + detokenizer.finish()


def seeded(seed: int) -> random.Random:
    return random.Random(seed)


def chunks(ids: Sequence[int], size: int) -> list[Sequence[int]]:
    return [ids[start : start + size] for start in range(0, len(ids), size)]


FIRE, SMILE, CHINESE = [10813, 238, 115], [10813, 38887], [18645, 250, 48392, 138]
LOOKS_LIKE_EOS = [44, 108, 306, 79, 486, 108, 46]
IDS = [
    FIRE,
    SMILE,
    CHINESE,
    [85, 151, 219],
    [10813, 238],
    [10813] * 5,
    [238, 115, *FIRE],
    [*FIRE, 10813],
    [*LOOKS_LIKE_EOS, 2],
    [1, 2, 0, 16, *SMILE, 2],
    [33203, 23960, 57, 58],
    [],
]


@pytest.mark.parametrize("ids", IDS)
def test_every_split_is_what_decode_says(tokenizer: Tokenizer, factory: DetokenizerFactory, ids: list[int]) -> None:
    expected = tokenizer.decode(ids)
    for first in range(len(ids) + 1):
        for second in range(first, len(ids) + 1):
            assert run(factory, [ids[:first], ids[first:second], ids[second:]]) == expected
    assert run(factory, chunks(ids, 1)) == expected


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is Paris.",
        "\N{FIRE}\N{SLIGHTLY SMILING FACE}",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "한국어 음절",
        "e\u0301 \u0915\u094d\u0937",
        "\n\n  def f(x):\n\treturn x  ",
    ],
)
def test_text_comes_back(tokenizer: Tokenizer, factory: DetokenizerFactory, text: str) -> None:
    ids = tokenizer.encode(text).ids
    for size in range(1, 9):
        assert run(factory, chunks(ids, size)) == text


@pytest.mark.parametrize("size", [1, 4, 8])
def test_random_ids_are_what_decode_says(tokenizer: Tokenizer, factory: DetokenizerFactory, size: int) -> None:
    """64 random ids a seed: mostly half characters and invalid bytes."""
    for seed in range(200):
        ids = seeded(seed).choices(range(tokenizer.get_vocab_size()), k=64)
        assert run(factory, chunks(ids, size)) == tokenizer.decode(ids), seed


def test_random_bytes_are_what_decode_says(tokenizer: Tokenizer, factory: DetokenizerFactory) -> None:
    """Tokens that stand for non-ASCII bytes only: every kind of broken UTF-8."""
    broken = [
        token_id for token_id, token in enumerate(TokenTable.of(tokenizer).bytes_of) if token and max(token) > 127
    ]
    for seed in range(200):
        ids = seeded(seed).choices(broken, k=64)
        assert run(factory, chunks(ids, 1)) == tokenizer.decode(ids), seed


@given(st.binary(max_size=40))
def test_python_replaces_invalid_bytes_as_rust_does(data: bytes) -> None:
    """U+FFFD by U+FFFD: one for each maximal part of a character (Unicode 3.9, "substitution of maximal subparts")."""
    tokenizer = byte_tokenizer()
    ids = [tokenizer.token_to_id(byte_level_alphabet()[byte]) for byte in data]
    assert tokenizer.decode(ids) == data.decode("utf-8", errors="replace")
    assert run(DetokenizerFactory(tokenizer), chunks(ids, 1)) == tokenizer.decode(ids)


@cache
def byte_tokenizer() -> Tokenizer:
    vocabulary = {character: byte for byte, character in byte_level_alphabet().items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_an_unfinished_character_waits_and_an_invalid_one_does_not(factory: DetokenizerFactory) -> None:
    detokenizer = factory.new()
    assert detokenizer.push([10813]) == ""
    assert detokenizer.push([238]) == ""
    assert detokenizer.push([115]) == "\N{FIRE}"
    assert detokenizer.push([10813]) == ""
    assert detokenizer.push([10813]) == "\ufffd"  # its predecessor can no longer become a character
    assert detokenizer.finish() == "\ufffd"


def test_invalid_bytes_never_pile_up(factory: DetokenizerFactory) -> None:
    """A thousand first halves of a character: each push releases the one before."""
    detokenizer = factory.new()
    texts = [detokenizer.push([10813]) for _ in range(1000)]
    assert texts == ["", *["\ufffd"] * 999]


def test_ids_outside_the_vocabulary_and_special_ids_are_no_text(factory: DetokenizerFactory) -> None:
    detokenizer = factory.new()
    assert detokenizer.push([-1, 49152, 2**40, *range(17)]) == ""
    assert detokenizer.finish() == ""


def test_added_tokens_that_are_not_special_are_text() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer().to_str())
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken(" é ", normalized=False)])
    tokenizer.add_special_tokens(["<s>"])
    ids = [*range(97, 100), *range(256, tokenizer.get_vocab_size()), 195]
    assert run(DetokenizerFactory(tokenizer), chunks(ids, 1)) == tokenizer.decode(ids) == "abc<think> é \ufffd"


LLAMA_2 = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
PIECES = ["▁", "▁▁", "▁hi", "there", "▁▁x", "é", "<0x+5>", "<0x4>", "<unk>", "a▁b"]


@cache
def piece_tokenizer(decoder_json: str) -> Tokenizer:
    tokens = ["<s>", *PIECES, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([])
    tokenizer.decoder = {
        "llama2": LLAMA_2,
        "gemma": GEMMA,
        "metaspace": decoders.Metaspace(),
        "metaspace-never": decoders.Metaspace(prepend_scheme="never"),
    }[decoder_json]
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@pytest.mark.parametrize("decoder", ["llama2", "gemma", "metaspace", "metaspace-never"])
def test_pieces_with_byte_fallback_are_what_decode_says(decoder: str) -> None:
    """Random pieces, spaces and runs of bytes, valid and not, the first token's space included.

    Runs shorter than 32 bytes: `test_a_long_run_of_characters_is_not_held_for_ever` has the others.
    """
    tokenizer = piece_tokenizer(decoder)
    factory = DetokenizerFactory(tokenizer)
    assert isinstance(factory.new(), PieceDetokenizer)
    first_byte = tokenizer.token_to_id("<0x00>")
    for seed in range(400):
        source = seeded(seed)
        ids: list[int] = source.choices(range(4), k=2) if seed % 2 else []
        for turn in range(20):
            if turn % 2:
                ids += source.choices(range(1, first_byte), k=1)  # ends a run of bytes
            if source.random() < 0.5:
                ids += source.choices(range(first_byte), k=source.randint(1, 3))
            else:
                ids += [first_byte + byte for byte in source.choice(["€", "🔥é", "한국"]).encode()]
                ids += [first_byte + source.randrange(256)] if source.random() < 0.3 else []
        assert run(factory, chunks(ids, 1)) == run(factory, chunks(ids, 7)) == tokenizer.decode(ids), (seed, ids)


def test_a_run_of_bytes_waits_until_it_is_decided() -> None:
    tokenizer = piece_tokenizer("llama2")
    detokenizer = DetokenizerFactory(tokenizer).new()
    euro = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in "€".encode()]
    there = tokenizer.token_to_id("there")
    assert [detokenizer.push([token_id]) for token_id in euro] == ["", "", ""]
    assert detokenizer.push([there]) == "€there"
    assert [detokenizer.push([token_id]) for token_id in [*euro, euro[1], euro[1]]] == [
        "",
        "",
        "",
        "\ufffd" * 4,
        "\ufffd",
    ]
    assert detokenizer.push([there]) == "there"
    assert detokenizer.push(euro[:2]) == ""
    assert detokenizer.finish() == "\ufffd\ufffd"


def test_a_long_run_of_characters_is_not_held_for_ever() -> None:
    tokenizer = piece_tokenizer("gemma")
    detokenizer = DetokenizerFactory(tokenizer).new()
    ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in ("한" * 100).encode()]
    texts = [detokenizer.push([token_id]) for token_id in ids]
    waited = 0
    for text in texts:
        waited = 0 if text else waited + 1
        assert waited < 36
    assert "".join(texts) + detokenizer.finish() == tokenizer.decode(ids)


def test_other_decoders_go_through_a_window(tokenizer: Tokenizer) -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "##c": 2, "[UNK]": 3}, unk_token="[UNK]"))
    for decoder in (None, decoders.WordPiece()):
        if decoder is not None:
            words.decoder = decoder
        factory = DetokenizerFactory(words)
        assert isinstance(factory.new(), WindowDetokenizer)
        ids = seeded(0).choices(range(4), k=100)
        assert run(factory, chunks(ids, 1)) == run(factory, chunks(ids, 3)) == words.decode(ids)
    window = WindowDetokenizer(tokenizer)
    text = "한국어 \N{FIRE}" * 20
    ids = tokenizer.encode(text).ids
    assert "".join(window.push([token_id]) for token_id in ids) + window.finish() == text


def test_the_window_stays_small(tokenizer: Tokenizer) -> None:
    window = WindowDetokenizer(tokenizer)
    assert "".join(window.push([10813]) for _ in range(100)).count("\ufffd") >= 90
    assert len(window._ids) <= 20


def test_detokenizers_share_the_table_and_nothing_else(factory: DetokenizerFactory) -> None:
    first, second = factory.new(), factory.new()
    assert isinstance(first, ByteLevelDetokenizer)
    assert first.push([10813, 238]) == ""
    assert second.push(FIRE) == "\N{FIRE}"
    assert first.push([115]) == "\N{FIRE}"


@pytest.mark.parametrize("content", [None, "", "{}", '{"model": 1}'])
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        DetokenizerFactory.load(tmp_path)
