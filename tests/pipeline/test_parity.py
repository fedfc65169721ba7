"""Greedy ids through the public API equal transformers, whoever else is in the batch and whatever is cached."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.pipeline.reference import Reference

MAX_TOKENS = 12


@pytest.fixture(scope="module")
def expected(default_model_dir):
    """Prompt → ids, by the reference."""
    reference = Reference(default_model_dir)
    prompts = reference.prompts()
    assert len(prompts) == 40
    assert sum(len(prompt) > 512 for prompt in prompts) >= 5, "some prompts must span more than one chunk"
    return [(prompt, reference.greedy(prompt, MAX_TOKENS)) for prompt in prompts]


def ask(client, prompt):
    answer = client.generate(token_ids=prompt, temperature=0, max_tokens=MAX_TOKENS, include_token_ids=True)
    return list(answer.token_ids), answer.usage.cached_token_count


def test_alone_cold_and_cached(pipeline, expected):
    """Each prompt alone, first with an empty prefix cache, then again from it."""
    pipeline.flush_prefix_cache()
    with pipeline.client() as client:
        for prompt, wanted in expected:
            assert ask(client, prompt)[0] == wanted
        again = [ask(client, prompt) for prompt, _ in expected]
    assert [ids for ids, _ in again] == [wanted for _, wanted in expected]
    assert sum(cached for _, cached in again) > 3000, "the second round must come from the cache"


def test_sixteen_at_a_time_cold_and_cached(pipeline, expected):
    """The same, 16 in flight."""
    pipeline.flush_prefix_cache()
    with pipeline.client() as client, ThreadPoolExecutor(16) as pool:
        for _ in ("cold", "cached"):
            answers = list(pool.map(lambda pair: ask(client, pair[0])[0], expected))
            assert answers == [wanted for _, wanted in expected]


def test_chat_and_raw_text_are_encoded_as_transformers_does(pipeline, default_model_dir):
    """The public Tokenize gives the ids of `apply_chat_template` and of the plain tokenizer."""
    reference = Reference(default_model_dir)
    from tests.pipeline.reference import LONG, QUESTIONS, RAW

    with pipeline.client() as client:
        got = [list(client.tokenize(messages=[("user", question)])) for question in QUESTIONS]
        got += [list(client.tokenize(text)) for text in RAW + LONG]
    assert got == reference.prompts()
