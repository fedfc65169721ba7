"""One bad number in one request is refused by name, at once, and costs nobody else anything."""

from __future__ import annotations

import threading
import time

import grpc
import pytest

from headrace import errors
from headrace.answers import error_of as error_of_call
from headrace.v1 import gateway_pb2, gateway_pb2_grpc
from headrace.v1.generation_pb2 import Chat, ChatMessage, ContentPart, Generation, SamplingParameters, StopConditions

NAN, INF = float("nan"), float("inf")
BAD_SAMPLING = {
    "temperature": (NAN, INF, -1, 1e30, -1e-9),
    "top_p": (NAN, -1, 0, 2, INF),
    "top_k": (-5, -2),
    "min_p": (NAN, -0.1, 1.1),
    "repetition_penalty": (NAN, 0, -1, INF),
    "presence_penalty": (NAN, -3, 3),
    "frequency_penalty": (NAN, -3, INF),
}
BAD: list[tuple[str, Generation]] = [
    *[
        (f"generation.sampling.{name}", Generation(prompt="x", sampling=SamplingParameters(**{name: value})))
        for name, values in BAD_SAMPLING.items()
        for value in values
    ],
    ("generation.input", Generation()),
    ("generation.max_tokens", Generation(prompt="x", max_tokens=0)),
    ("generation.max_tokens", Generation(prompt="x", max_tokens=-1)),
    ("generation.min_tokens", Generation(prompt="x", min_tokens=-1)),
    ("generation.min_tokens", Generation(prompt="x", min_tokens=9, max_tokens=8)),
    ("generation.min_tokens", Generation(prompt="x", min_tokens=2**31 - 1)),
    ("generation.n", Generation(prompt="x", n=0)),
    ("generation.n", Generation(prompt="x", n=-1)),
    ("generation.n", Generation(prompt="x", n=5_000_000)),
    ("generation.logprobs", Generation(prompt="x", logprobs=10**9)),
    ("generation.resumable", Generation(prompt="x", resumable=True, n=2)),
    ("generation.prompt_logprobs", Generation(prompt="x", prompt_logprobs=-1)),
    ("generation.stop.strings", Generation(prompt="x", stop=StopConditions(strings=["a"] * 10_000))),
    ("generation.stop.strings[0]", Generation(prompt="x", stop=StopConditions(strings=[""]))),
    ("generation.stop.strings[1]", Generation(prompt="x", stop=StopConditions(strings=["a", "b" * 1_000_000]))),
    ("generation.stop.token_ids[0]", Generation(prompt="x", stop=StopConditions(token_ids=[49152]))),
    ("generation.token_ids.ids[0]", Generation(token_ids={"ids": [-1]})),
    ("generation.token_ids.ids[2]", Generation(token_ids={"ids": [1, 2, 49152]})),
    ("generation.token_ids.ids", Generation(token_ids={})),
    ("generation.token_ids", Generation(token_ids={"ids": [5] * 8192})),
    ("generation.prompt", Generation(prompt="")),
    ("generation.prompt", Generation(prompt="\x04")),
    ("generation.prompt", Generation(prompt="a" * (16 * 8192 + 1))),
    ("generation.prompt", Generation(prompt="a b " * 8192)),
    ("generation", Generation(token_ids={"ids": [300] * 3_000_000})),
    ("generation.chat.messages", Generation(chat=Chat())),
    ("generation.chat.messages[0].role", Generation(chat=Chat(messages=[ChatMessage(content="x")]))),
    (
        "generation.chat.messages[0].parts[0]",
        Generation(chat=Chat(messages=[ChatMessage(role=2, parts=[ContentPart(image_uri="x")])])),
    ),
    (
        "generation.chat.messages[0]",
        Generation(chat=Chat(messages=[ChatMessage(role=2, content="x", parts=[ContentPart(text="x")])])),
    ),
    ("generation.sampling.logit_bias", Generation(prompt="x", sampling=SamplingParameters(logit_bias={49152: 1}))),
    ("generation.sampling.logit_bias[5]", Generation(prompt="x", sampling=SamplingParameters(logit_bias={5: NAN}))),
    (
        "generation.sampling.allowed_token_ids[0]",
        Generation(prompt="x", sampling=SamplingParameters(allowed_token_ids=[-1])),
    ),
    ("generation.sampling.bad_words[0]", Generation(prompt="x", sampling=SamplingParameters(bad_words=[""]))),
    ("generation.request_id", Generation(prompt="x", request_id="r" * 129)),
    ("generation.metadata", Generation(prompt="x", metadata={"k" * 65: "v"})),
    ("generation.priority", Generation(prompt="x", priority=17)),
]


def refusal(stub, generation: Generation) -> errors.HeadraceError:
    with pytest.raises(grpc.RpcError) as caught:
        stub.Generate(gateway_pb2.GenerateRequest(generation=generation), timeout=10)
    error = caught.value
    return error_of_call(error)


@pytest.fixture(scope="module")
def stub(pipeline):
    with grpc.insecure_channel(pipeline.target) as channel:
        yield gateway_pb2_grpc.GatewayServiceStub(channel)


def test_every_bad_value_is_refused_by_name_beside_a_running_stream(pipeline, stub):
    """INVALID_ARGUMENT naming field and value in under 100 ms; the stream beside it is what it is alone."""
    wanted = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 150, "ignore_eos": True}
    with pipeline.client() as client:
        alone = client.stream(**wanted).read_all().text
        beside: list[str] = []
        streaming = threading.Thread(target=lambda: beside.append(client.stream(**wanted).read_all().text))
        streaming.start()
        slow = []
        for field, generation in BAD:
            began = time.perf_counter()
            error = refusal(stub, generation)
            took = time.perf_counter() - began
            assert isinstance(error, errors.InvalidArgument), (field, error)
            assert error.field == field, (field, error.field, error.message)
            assert len(error.message) < 1000
            slow += [(field, took)] if took > 0.1 else []
        streaming.join()
    assert beside == [alone]
    # The first two carry 12 MB and 130 kB: sending them alone takes a while on a busy machine.
    assert [entry for entry in slow if entry[0] not in ("generation", "generation.prompt")] == []
    assert pipeline.engine_state().stats.running_count == 0


def test_an_unknown_model_is_not_found(stub):
    """NOT_FOUND with the names that are served."""
    error = refusal(stub, Generation(prompt="x", model="gpt-9"))
    assert isinstance(error, errors.NotFound)
    assert "smollm2-135m-instruct" in error.message


def test_worst_case_beyond_the_kv_pool(own_kv_pipeline):
    """Explicit max_tokens that never fit: INVALID_ARGUMENT (KV_CAPACITY); unset: lowered to what fits."""
    with own_kv_pipeline.client() as client:
        with pytest.raises(errors.InvalidArgument) as caught:
            client.generate(token_ids=[500] * 100, max_tokens=1000)
        assert caught.value.reason == "KV_CAPACITY"
        assert "1000" in caught.value.message
        answer = client.generate(token_ids=[500] * 100, ignore_eos=True, temperature=0)
    assert answer.finish_reason == "length"
    assert 100 <= 100 + answer.usage.completion_token_count <= 257


@pytest.fixture
def own_kv_pipeline(default_model_dir, receiver):
    from tests.pipeline.conftest import start_pipeline

    with start_pipeline(receiver, ENGINE_KV_BLOCKS="16") as small:
        yield small


def test_tiny_temperatures_are_greedy(pipeline):
    """0, 1e-12, 1e-6, top_k 1 and an unset field are what policies say."""
    with pipeline.client() as client:
        answers = [
            client.generate("The sky is", max_tokens=12, **sampling).text
            for sampling in ({"temperature": 0}, {"temperature": 1e-12}, {"temperature": 1e-6}, {"top_k": 1})
        ]
    assert len(set(answers)) == 1
