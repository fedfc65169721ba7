"""A tokenizer that comes out of a GGUF file gives the ids of the one that went in."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, Qwen2Tokenizer

from headrace.models.gguf.file import GgufFile
from headrace.models.gguf.splitting import SPLITTERS
from headrace.models.gguf.tokenizer import write_tokenizer
from services.tokenizer.vocabulary import Vocabulary
from tests.headrace.gguf_models import ALPHABET, tokenizer_metadata

TEXTS = [
    "hello world",
    "  two  spaces   three    and more                                     ",
    " lead\n\nlines\r\n\ttab",
    "don't STOP; we'Ve 1234567 x=3.14",
    "naïve cafe\u0301 日本語 🙂👩‍👧 ﬁ",  # a letter and its accent apart: NFC joins them
    "def f(x):\n    return x ** 2\n",
    "",
]
LETTERS = "abcdefghijklmnopqrstuvwxyz .,'"


def write(directory: Path, metadata: dict[str, Any]) -> Tokenizer:
    """Write the tokenizer's files for `metadata`, with the config.json that belongs to them."""
    directory.mkdir(exist_ok=True)
    size = len(metadata["tokenizer.ggml.tokens"])
    ids = write_tokenizer(GgufFile(Path("m.gguf"), metadata, {}), directory, size)
    (directory / "config.json").write_text(json.dumps({"vocab_size": size, "max_position_embeddings": 64, **ids}))
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


# --- byte-level ---------------------------------------------------------------------------------------------


def test_byte_level_ids_equal_the_source(tmp_path: Path) -> None:
    """Against the tokenizer class of Qwen2 in `transformers`, made of the same vocabulary and merges."""
    metadata = tokenizer_metadata()
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: place for place, token in enumerate(metadata["tokenizer.ggml.tokens"][:262])}
    source = Qwen2Tokenizer(vocab=vocabulary, merges=merges, additional_special_tokens=["<|begin|>", "<|end|>"])
    write(tmp_path, metadata)
    ours = Vocabulary.load(tmp_path)
    assert ours.encode_texts(TEXTS) == [source.encode(text, add_special_tokens=False) for text in TEXTS]
    assert [ours.decode(ids) for ids in ours.encode_texts(TEXTS[:4])] == TEXTS[:4]
    again = AutoTokenizer.from_pretrained(tmp_path)
    middle = source.encode("hello", add_special_tokens=False)
    assert again.encode("<|begin|>hello<|end|><tool>", add_special_tokens=False) == [259, *middle, 260, 261]


def test_token_types_decide_what_is_control_and_what_is_padding(tmp_path: Path) -> None:
    """Control tokens are special, user-defined ones are plain, padding up to the embeddings is left out."""
    write(tmp_path, tokenizer_metadata())
    facts = Vocabulary.load(tmp_path).facts
    assert (facts.size, facts.special_ids, facts.bos_id, facts.eos_ids) == (262, (259, 260), 259, (260,))
    assert "messages" in (tmp_path / "chat_template.jinja").read_text()


def test_every_token_that_ends_an_answer_is_named(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_metadata() | {"tokenizer.ggml.eot_token_id": 261, "tokenizer.ggml.eom_token_id": 260})
    assert Vocabulary.load(tmp_path).facts.eos_ids == (260, 261)


@pytest.mark.parametrize("name", SPLITTERS)
def test_every_way_of_splitting_loses_nothing(tmp_path: Path, name: str) -> None:
    tokenizer = write(tmp_path, tokenizer_metadata() | {"tokenizer.ggml.pre": name})
    for text in (TEXTS[0], TEXTS[1], TEXTS[3], TEXTS[5]):
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama-bpe", ["It", "'S", "Ġ", "123", "45", "Ġ(", "hi", ")ĊĊ"]),
        ("qwen2", ["It", "'S", "Ġ", "1", "2", "3", "4", "5", "Ġ(", "hi", ")ĊĊ"]),
        ("smollm", ["It", "'", "S", "Ġ", "1", "2", "3", "4", "5", "Ġ(", "hi", ")", "ĊĊ"]),
        ("gpt-2", ["It", "'", "S", "Ġ12345", "Ġ(", "hi", ")", "ĊĊ"]),
        ("tekken", ["It", "'S", "Ġ", "1", "2", "3", "4", "5", "Ġ(", "hi", ")ĊĊ"]),
    ],
)
def test_words_are_split_as_the_family_does(name: str, words: list[str]) -> None:
    assert [word for word, _ in SPLITTERS[name]().pre_tokenize_str("It'S 12345 (hi)\n\n")] == words


@pytest.mark.parametrize(("pre", "stated", "adds"), [("llama-bpe", None, True), ("llama-bpe", False, False)])
def test_the_first_token_is_added_as_the_file_or_the_family_says(
    tmp_path: Path, pre: str, stated: bool | None, adds: bool
) -> None:
    metadata = tokenizer_metadata() | {"tokenizer.ggml.pre": pre}
    del metadata["tokenizer.ggml.add_bos_token"]
    metadata |= {} if stated is None else {"tokenizer.ggml.add_bos_token": stated}
    assert write(tmp_path, metadata).encode("a").ids == [259] * adds + [ALPHABET.index("a")]


# --- SentencePiece ------------------------------------------------------------------------------------------


def sentencepiece_metadata() -> dict[str, Any]:
    """A vocabulary in the manner of Llama 2: control, bytes, joined pieces by falling score, then characters."""
    spaces = ["▁" * count for count in range(2, 17)]
    joined = ["▁t", "he", "in", "▁the", "er", "▁a", "on", "ll", "hell", "▁hello", "ello", "wor", "▁w", "or", "ld"]
    joined += ["world", "▁world", "an", "and", "▁and", "re", "th", "three", "ee", "thr", "▁s", "pa", "ce"]
    characters = ["▁", *(letter for letter in LETTERS if letter != " "), *"HWS\n1"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *joined, *spaces, *characters]
    merged = len(joined) + len(spaces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (merged + len(characters)),
        "tokenizer.ggml.scores": [0.0] * 259 + [float(-place) for place in range(merged + len(characters))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def sentencepiece_ids(metadata: dict[str, Any], text: str, prefix: str = "▁") -> list[int]:
    """SentencePiece's BPE as its paper has it: join the leftmost pair whose piece has the best score."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    scores = {
        token: (metadata["tokenizer.ggml.scores"][place], place)
        for place, token in enumerate(tokens)
        if types[place] == 1
    }
    pieces = list(prefix + text.replace(" ", "▁")) if text else []
    while True:
        pairs = [
            (scores[pieces[i] + pieces[i + 1]][0], -i)
            for i in range(len(pieces) - 1)
            if pieces[i] + pieces[i + 1] in scores
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids = []
    for piece in pieces:
        ids += [scores[piece][1]] if piece in scores else [3 + byte for byte in piece.encode()]
    return ids


def test_sentencepiece_ids_equal_the_algorithm(tmp_path: Path) -> None:
    """Merges made of scores join what the scores themselves join; unknown characters become bytes."""
    metadata = sentencepiece_metadata()
    tokenizer = write(tmp_path, metadata)
    for text in [*TEXTS, "the hello world and the three spaces", "hellothreeand wor ld"]:
        expected = sentencepiece_ids(metadata, text)
        assert tokenizer.encode(text, add_special_tokens=False).ids == expected, text
        assert tokenizer.encode(text).ids == [1, *expected]
        assert tokenizer.decode(expected) == text
    facts = Vocabulary.load(tmp_path).facts
    assert (facts.special_ids, facts.bos_id, facts.eos_ids) == ((0, 1, 2), 1, (2,))


def test_a_file_may_say_that_no_space_is_put_in_front(tmp_path: Path) -> None:
    metadata = sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False}
    tokenizer = write(tmp_path, metadata)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == sentencepiece_ids(metadata, text, prefix="")
        assert tokenizer.decode(ids) == text
