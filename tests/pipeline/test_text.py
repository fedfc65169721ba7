"""Text through the public API, from models made to be hard: halves of characters, split stops, scripted ends."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer

from tests.engine.factories import write_scripted_model
from tests.pipeline.conftest import VOCABULARY, add_tokenizer, start_pipeline

SEEDS = {1: 50, 4: 200, 8: 50}  # by tokens in a message


@pytest.fixture(scope="module")
def tokenizer(default_model_dir):
    return Tokenizer.from_file(str(default_model_dir / "tokenizer.json"))


@pytest.mark.parametrize("coalesce", SEEDS)
def test_random_text_three_ways(random_model, receiver, tokenizer, coalesce):
    """Seeds, all tokens possible: streamed == unary == decode of the ids, no message with a stray U+FFFD."""
    variables = {"MODEL": str(random_model), "STREAM_COALESCE_TOKENS": str(coalesce)}
    with start_pipeline(receiver, **variables) as pipeline, pipeline.client() as client, ThreadPoolExecutor(16) as pool:

        def three_ways(seed):
            fields = {"temperature": 1.0, "top_p": 1.0, "seed": seed, "max_tokens": 64, "include_token_ids": True}
            stream = client.stream(token_ids=[500, 600, 700], **fields)
            deltas = list(stream)
            unary = client.generate(token_ids=[500, 600, 700], **fields)
            ids = [token for delta in deltas for token in delta.token_ids]
            assert list(unary.token_ids) == ids
            wanted = tokenizer.decode(ids)
            assert "".join(delta.text for delta in deltas) == stream.answer.text == unary.text == wanted
            assert sum(delta.text.count("\ufffd") for delta in deltas) == wanted.count("\ufffd")
            return "\ufffd" in wanted

        seeds = SEEDS[coalesce]
        assert sum(pool.map(three_ways, range(seeds))) > seeds // 4, "the model must make half characters"


SCRIPT = [33, 10813, 238, 115, 18645, 250, 48392, 138, 85, 151, 219, 33203, 23960, 57, 58, 44, 2]


@pytest.fixture(scope="module")
def scripted(default_model_dir, tmp_path_factory, receiver):
    """SCRIPTED: says SCRIPT whatever it is asked with token 100, and ends."""
    directory = tmp_path_factory.mktemp("scripted") / "scripted"
    successor = dict(zip([100, *SCRIPT], [*SCRIPT, 2], strict=True))
    write_scripted_model(directory, successor, vocab_size=VOCABULARY)
    config = json.loads((directory / "config.json").read_text())
    assert config["vocab_size"] == VOCABULARY
    add_tokenizer(directory, default_model_dir)
    with start_pipeline(receiver, MODEL=str(directory), STREAM_COALESCE_TOKENS="8") as pipeline:
        yield pipeline


def ask(client, **fields):
    fields = {"token_ids": [100], "temperature": 0, "include_token_ids": True, **fields}
    stream = client.stream(**fields)
    deltas = list(stream)
    unary = client.generate(**fields)
    assert "".join(delta.text for delta in deltas) == stream.answer.text == unary.text
    assert stream.answer.finish_reason == unary.finish_reason
    assert stream.answer.matched_stop == unary.matched_stop
    assert sum(delta.token_count for delta in deltas) == unary.usage.completion_token_count
    return unary


def test_the_script_is_said(scripted, tokenizer):
    """Emoji, Chinese, a combining accent, then EOS: whole, and EOS counted and not shown."""
    with scripted.client() as client:
        answer = ask(client, max_tokens=100)
    assert list(answer.token_ids) == SCRIPT
    assert answer.text == tokenizer.decode(SCRIPT)
    assert (answer.finish_reason, answer.matched_token_id) == ("stop", 2)


@pytest.mark.parametrize("length", range(1, len(SCRIPT)))
def test_cut_anywhere(scripted, tokenizer, length):
    """max_tokens inside a character: its bytes are flushed as decode shows them."""
    with scripted.client() as client:
        answer = ask(client, max_tokens=length)
    assert answer.text == tokenizer.decode(SCRIPT[:length])
    assert (answer.finish_reason, answer.usage.completion_token_count) == ("length", length)


@pytest.mark.parametrize("stop", ["DEFGHIJ", "EFG", "IJM", "\N{FIRE}", "e\u0301DE", "M"])
def test_split_stops(scripted, tokenizer, stop):
    """A stop over several tokens and messages never shows; tokens are counted up to the one that completed it."""
    whole = tokenizer.decode(SCRIPT)
    with scripted.client() as client:
        answer = ask(client, max_tokens=100, stop=[stop])
    wanted = whole[: whole.find(stop)] if stop in whole else whole
    assert answer.text == wanted
    if stop in whole:
        assert answer.matched_stop == stop
        ids = list(answer.token_ids)
        assert stop in tokenizer.decode(ids)
        assert stop not in tokenizer.decode(ids[:-1])


def test_the_beginning_of_a_stop_is_released_at_the_end(scripted, tokenizer):
    """The answer ends with what could have become a stop: it is text after all."""
    whole = tokenizer.decode(SCRIPT)
    with scripted.client() as client:
        answer = ask(client, max_tokens=100, stop=[whole[-3:] + "AAAA"])
    assert (answer.text, answer.finish_reason, answer.matched_stop) == (whole, "stop", None)
