"""Sampling through the public API: answers, log probabilities, penalties, stops; streamed and unary alike."""

from __future__ import annotations

import grpc
import pytest

from headrace.v1 import gateway_pb2, gateway_pb2_grpc
from headrace.v1.generation_pb2 import Generation, SamplingParameters, StopConditions, TokenIds

PROMPT = "The three primary colours are"


@pytest.fixture(scope="module")
def stub(pipeline):
    with grpc.insecure_channel(pipeline.target) as channel:
        yield gateway_pb2_grpc.GatewayServiceStub(channel)


def unary(stub, **fields) -> gateway_pb2.GenerateResponse:
    fields.setdefault("prompt", PROMPT)
    fields.setdefault("max_tokens", 12)
    if fields["prompt"] is None:
        del fields["prompt"]
    return stub.Generate(gateway_pb2.GenerateRequest(generation=Generation(include_token_ids=True, **fields)))


def streamed(stub, **fields):
    fields.setdefault("prompt", PROMPT)
    fields.setdefault("max_tokens", 12)
    generation = Generation(include_token_ids=True, **fields)
    messages = list(stub.GenerateStream(gateway_pb2.GenerateStreamRequest(generation=generation)))
    assert [message.sequence_number for message in messages] == list(range(len(messages)))
    assert [message.WhichOneof("event") for message in messages] == ["delta"] * (len(messages) - 1) + ["final"]
    return [message.delta for message in messages[:-1]], messages[-1].final


SAMPLED = SamplingParameters(temperature=0.9, top_p=0.95, seed=1234)


def test_several_answers(stub):
    """Answer 0 of n is the answer of n = 1; all differ; usage counts every token; streamed equals unary."""
    alone = unary(stub, sampling=SAMPLED).answers[0]
    response = unary(stub, sampling=SAMPLED, n=4)
    assert [answer.ending.index for answer in response.answers] == [0, 1, 2, 3]
    assert list(response.answers[0].token_ids) == list(alone.token_ids)
    assert len({tuple(answer.token_ids) for answer in response.answers}) == 4
    counts = [answer.ending.completion_token_count for answer in response.answers]
    assert response.usage.completion_token_count == sum(counts) == sum(len(a.token_ids) for a in response.answers)
    assert response.usage.prompt_token_count == 5
    deltas, final = streamed(stub, sampling=SAMPLED, n=4)
    for answer in response.answers:
        own = [delta for delta in deltas if delta.index == answer.ending.index]
        assert "".join(delta.text for delta in own) == answer.text
        assert [token for delta in own for token in delta.token_ids] == list(answer.token_ids)
    assert [ending.index for ending in final.endings] == [0, 1, 2, 3]
    assert abs(final.timings.residual_ns) <= max(2e6, 0.02 * final.timings.total_ns)


def test_a_seed_repeats_alone_and_in_company(stub):
    """The same seed gives the same ids whoever else runs; another seed gives others."""
    first = unary(stub, sampling=SAMPLED).answers[0].token_ids
    futures = [
        stub.Generate.future(
            gateway_pb2.GenerateRequest(
                generation=Generation(prompt=PROMPT, max_tokens=12, include_token_ids=True, sampling=SAMPLED)
            )
        )
        for _ in range(8)
    ]
    assert all(list(future.result().answers[0].token_ids) == list(first) for future in futures)
    other = SamplingParameters(temperature=0.9, top_p=0.95, seed=1235)
    assert list(unary(stub, sampling=other).answers[0].token_ids) != list(first)


def test_logprobs_come_with_each_token(stub):
    """One entry a token, finite, the chosen one's own value, alternatives ordered; the same streamed."""
    fields = {"sampling": SamplingParameters(temperature=0), "logprobs": 3, "max_tokens": 17}
    answer = unary(stub, **fields).answers[0]
    assert [entry.token_id for entry in answer.logprobs] == list(answer.token_ids)
    for entry in answer.logprobs:
        values = [alternative.logprob for alternative in entry.alternatives]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob == values[0] <= 0
        assert entry.logprob >= -9999
        assert entry.alternatives[0].token_id == entry.token_id
    assert b"".join(entry.token_bytes for entry in answer.logprobs).decode() == answer.text
    deltas, _ = streamed(stub, **fields)
    assert all(len(delta.logprobs) == delta.token_count for delta in deltas)
    assert [entry.logprob for delta in deltas for entry in delta.logprobs] == [e.logprob for e in answer.logprobs]


def test_logprobs_are_of_the_unfiltered_distribution(stub):
    """top_k 1, a low temperature or a bias change the choice, never the numbers of the first token."""
    plain = unary(stub, sampling=SamplingParameters(temperature=0), logprobs=5, max_tokens=1).answers[0].logprobs[0]
    for sampling in (SamplingParameters(top_k=1), SamplingParameters(temperature=0.01, top_p=0.3, seed=1)):
        entry = unary(stub, sampling=sampling, logprobs=5, max_tokens=1).answers[0].logprobs[0]
        assert entry.alternatives == plain.alternatives


def test_prompt_logprobs_come_with_the_final_message(stub):
    """One entry a prompt token after the first, once for n answers, the same streamed, and the prompt cached or not."""
    fields = {"sampling": SAMPLED, "prompt_logprobs": 2, "max_tokens": 4}
    response = unary(stub, n=2, **fields)
    entries = response.prompt_logprobs
    assert len(entries) == response.usage.prompt_token_count - 1 == 4
    assert b"".join(entry.token_bytes for entry in entries).decode() == PROMPT.removeprefix("The")
    for entry in entries:
        assert -9999 <= entry.logprob <= entry.alternatives[0].logprob <= 0
        assert len(entry.alternatives) == 2
    _, final = streamed(stub, **fields)
    assert [entry.token_id for entry in final.prompt_logprobs] == [entry.token_id for entry in entries]
    assert [entry.logprob for entry in final.prompt_logprobs] == pytest.approx([e.logprob for e in entries], abs=1e-2)


def test_bias_allowed_and_banned(stub):
    """A bias forces a token, allowed ids are the only ones, bad words do not appear."""
    greedy = {"temperature": 0}
    forced = unary(stub, sampling=SamplingParameters(logit_bias={5000: 100.0}, **greedy), max_tokens=3)
    assert list(forced.answers[0].token_ids) == [5000] * 3
    allowed = unary(stub, sampling=SamplingParameters(allowed_token_ids=[7, 8, 9], **greedy), max_tokens=6)
    assert set(allowed.answers[0].token_ids) <= {7, 8, 9}
    plain = unary(stub, sampling=SamplingParameters(**greedy)).answers[0].text
    word = plain.split()[0].strip(",.:")
    banned = unary(stub, sampling=SamplingParameters(bad_words=[word], **greedy)).answers[0].text
    assert word in plain
    assert word not in banned


def test_min_tokens_masks_every_ending(stub):
    """logit_bias {eos: 100}, min_tokens 4: four other tokens, then EOS: 5 tokens in all."""
    sampling = SamplingParameters(temperature=0, logit_bias={2: 100.0})
    response = unary(stub, sampling=sampling, min_tokens=4, max_tokens=32)
    ids = list(response.answers[0].token_ids)
    assert len(ids) == response.usage.completion_token_count == 5
    assert ids[-1] == 2
    assert 2 not in ids[:4]
    assert response.answers[0].ending.matched_token_id == 2


def test_penalties_change_a_loop(stub):
    """A text that repeats itself stops doing so under each penalty."""
    fields = {"prompt": None, "token_ids": TokenIds(ids=[28, 28, 28, 28]), "max_tokens": 24}
    plain = list(unary(stub, sampling=SamplingParameters(temperature=0), **fields).answers[0].token_ids)
    for penalty in ({"repetition_penalty": 1.8}, {"presence_penalty": 2.0}, {"frequency_penalty": 2.0}):
        ids = list(unary(stub, sampling=SamplingParameters(temperature=0, **penalty), **fields).answers[0].token_ids)
        assert len(set(ids)) > len(set(plain)), penalty


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_cut_exactly(stub, include):
    """For stops from the model's own text: text cut at the earliest, nothing of it shown, streamed and unary alike."""
    greedy = SamplingParameters(temperature=0)
    whole = unary(stub, sampling=greedy, max_tokens=40).answers[0].text
    for start in (3, 10, 17, 31):
        stop = whole[start : start + 5]
        wanted = whole[: whole.find(stop) + (len(stop) if include else 0)]
        conditions = StopConditions(strings=[stop, "never to be seen"], include_stop=include)
        response = unary(stub, sampling=greedy, max_tokens=40, stop=conditions)
        answer = response.answers[0]
        assert (answer.text, answer.ending.matched_stop) == (wanted, stop)
        deltas, final = streamed(stub, sampling=greedy, max_tokens=40, stop=conditions)
        assert "".join(delta.text for delta in deltas) == wanted
        assert sum(delta.token_count for delta in deltas) == final.usage.completion_token_count
        assert final.usage.completion_token_count == response.usage.completion_token_count


def test_a_stop_token_ends_and_is_counted(stub):
    """Its text is not sent; it is the last of the ids and part of the usage."""
    greedy = SamplingParameters(temperature=0)
    plain = unary(stub, sampling=greedy).answers[0]
    stopper = plain.token_ids[4]
    first = list(plain.token_ids).index(stopper)
    response = unary(stub, sampling=greedy, stop=StopConditions(token_ids=[stopper]))
    answer = response.answers[0]
    assert list(answer.token_ids) == list(plain.token_ids)[: first + 1]
    assert answer.ending.matched_token_id == stopper
    assert plain.text.startswith(answer.text)
    assert answer.ending.completion_token_count == first + 1


@pytest.mark.parametrize("max_tokens", range(1, 18))
def test_every_length_adds_up(stub, max_tokens):
    """max_tokens 1 to 17: tokens over messages == completion_tokens, one final message, text as the unary one's."""
    greedy = SamplingParameters(temperature=0)
    response = unary(stub, sampling=greedy, max_tokens=max_tokens)
    deltas, final = streamed(stub, sampling=greedy, max_tokens=max_tokens)
    assert sum(delta.token_count for delta in deltas) == final.usage.completion_token_count == max_tokens
    assert "".join(delta.text for delta in deltas) == response.answers[0].text
    assert final.endings[0].finish_reason == 2


def test_chat_counts_are_those_of_the_template(pipeline):
    """prompt_tokens of the facts table: templates, smuggled control tokens, unset content, late system messages."""
    rows = [
        ([("user", "hi")], 31),
        ([("system", "Be brief."), ("user", "hi")], 18),
        ([("system", ""), ("user", "hi")], 15),
        ([("user", "")], 30),
        ([("user", "None")], 31),
        ([("user", "hi"), ("system", "Be brief.")], 39),
        ([("user", "hi"), ("user", "hi")], 37),
        ([("user", "hi"), ("tool", "42")], 38),
        ([("user", "<|im_end|>")], 37),
    ]
    with pipeline.client() as client:
        counts = [client.generate(messages=messages, max_tokens=1).usage.prompt_token_count for messages, _ in rows]
    assert counts == [count for _, count in rows]
