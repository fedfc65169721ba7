"""The tokenizer: callers' text stays text, ids match the library's, broken files are named."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.tokenizer.inputs import UnknownTokenId
from services.tokenizer.vocabulary import Vocabulary, VocabularyError
from tests.tokenizer.tiny import write_tokenizer


def encode(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.encode_texts([text])[0]


def test_the_default_models_facts(vocabulary: Vocabulary) -> None:
    facts = vocabulary.facts
    assert (facts.size, facts.bos_id, facts.eos_ids) == (49152, 1, (2,))
    assert facts.special_ids == tuple(range(17))
    assert facts.context == 8192  # not tokenizer_config's model_max_length, 1e30
    assert facts.max_input_bytes == 16 * 8192


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<|im_end|>", [44, 108, 306, 79, 486, 108, 46]),
        ("DEFGHIJ", [33203, 23960, 57, 58]),
        ("\N{FIRE}", [10813, 238, 115]),
        ("\N{SLIGHTLY SMILING FACE}", [10813, 38887]),
        ("e\u0301", [85, 151, 219]),
        ("\u00e9", [2756]),
        ("\x04", []),
        ("\x1d", []),
        ("", []),
    ],
)
def test_known_ids(vocabulary: Vocabulary, text: str, ids: list[int]) -> None:
    """Also: no BOS is added, since this tokenizer's post-processor adds none."""
    assert encode(vocabulary, text) == ids


@pytest.mark.parametrize("control", range(17))
def test_no_control_token_comes_out_of_text(vocabulary: Vocabulary, parsing: Tokenizer, control: int) -> None:
    text = f"a {parsing.id_to_token(control)}b"
    assert control in parsing.encode(text).ids
    assert not set(encode(vocabulary, text)) & set(range(17))
    assert vocabulary.decode(encode(vocabulary, text)) == text


def test_bos_is_added_where_the_post_processor_says_so(tmp_path: Path) -> None:
    plain = Vocabulary.load(write_tokenizer(tmp_path / "plain"))
    adding = Vocabulary.load(write_tokenizer(tmp_path / "adding", adds_bos=True))
    assert encode(adding, "hi") == [adding.facts.bos_id, *encode(plain, "hi")]
    assert adding.encode_marked(["hi"])[0] == encode(plain, "hi")


def test_settings_for_truncation_and_padding_in_the_file_are_not_followed(tmp_path: Path) -> None:
    """A prompt is never cut silently."""
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert len(encode(Vocabulary.load(tmp_path), "abcd")) == 4


def test_decode_is_the_inverse_and_can_show_control_tokens(vocabulary: Vocabulary) -> None:
    ids = [1, 33203, 23960, 57, 58, 2]
    assert vocabulary.decode(ids) == "DEFGHIJ"
    assert vocabulary.decode(ids, include_special_tokens=True) == "<|im_start|>DEFGHIJ<|im_end|>"
    assert vocabulary.decode([10813, 238]) == "\ufffd"
    assert vocabulary.decode([10813] * 5) == "\ufffd" * 5
    assert vocabulary.decode([]) == ""


@pytest.mark.parametrize("token_id", [-1, 49152, 49153, 2**40])
def test_ids_outside_the_vocabulary_are_refused(vocabulary: Vocabulary, token_id: int) -> None:
    with pytest.raises(UnknownTokenId, match=rf"token id {token_id} .*49152") as caught:
        vocabulary.decode([5, token_id])
    assert caught.value.field == "token_ids[1]"


def test_sixteen_threads_give_what_one_gives(vocabulary: Vocabulary, parsing: Tokenizer) -> None:
    """Nothing is changed after loading, so nothing can be "already borrowed": 16 threads, 2000 mixed calls each."""
    words = ["hi", "<|im_end|>", "\N{FIRE}", "longer text with spaces " * 3, "\n\nx", ""]
    ids = [encode(vocabulary, word) for word in words]

    def work(seed: int) -> int:
        source = random.Random(seed)
        wrong = 0
        for _ in range(2000):
            place = source.randrange(len(words))
            call = source.randrange(3)
            if call == 0:
                wrong += encode(vocabulary, words[place]) != ids[place]
            elif call == 1:
                wrong += vocabulary.encode_marked([words[place]])[0] != ids[place]
            else:
                wrong += vocabulary.decode(ids[place]) != words[place]
        return wrong

    with ThreadPoolExecutor(16) as threads:
        assert sum(threads.map(work, range(16))) == 0


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
@pytest.mark.parametrize("content", [None, "", "{", "[1]", "{}"])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, name: str, content: str | None) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(VocabularyError, match=name.replace(".", r"\.")):
        Vocabulary.load(tmp_path)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, vocab_size=100)
    with pytest.raises(VocabularyError, match=r"ids up to \d+, but .* has 100 embeddings"):
        Vocabulary.load(tmp_path)


def test_a_padded_embedding_is_fine_and_does_not_widen_the_vocabulary(tmp_path: Path) -> None:
    facts = Vocabulary.load(write_tokenizer(tmp_path, vocab_size=4096)).facts
    assert facts.size < 300


def test_a_named_token_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, bos=None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<nope>"}}))
    with pytest.raises(VocabularyError, match=r"tokenizer_config\.json names eos_token '<nope>'"):
        Vocabulary.load(tmp_path)


def test_end_tokens_come_from_generation_config_then_config_then_the_tokenizer(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, eos_token_id=None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    last = Vocabulary.load(tmp_path)
    assert last.facts.eos_ids == (last.facts.special_ids[1],)
    assert last.facts.bos_id is None
    write_tokenizer(tmp_path, eos_token_id=7, bos_token_id=8, bos=None)
    assert Vocabulary.load(tmp_path).facts.eos_ids == (7,)
    assert Vocabulary.load(tmp_path).facts.bos_id == 8
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert Vocabulary.load(tmp_path).facts.eos_ids == (3, 4)
