"""Anything that the contract can hold is answered: never INTERNAL, never silence. `make fuzz` sends many more."""

from __future__ import annotations

import os
import threading

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace import errors
from headrace.answers import error_of as error_of_call
from headrace.v1 import gateway_pb2, gateway_pb2_grpc
from tests.fuzz.messages import messages

REQUESTS = int(os.environ.get("FUZZ", "300"))
TIMEOUT_S = 20.0
METHODS = {
    "Generate": gateway_pb2.GenerateRequest,
    "GenerateStream": gateway_pb2.GenerateStreamRequest,
    "GenerateSession": gateway_pb2.GenerateSessionRequest,
    "Tokenize": gateway_pb2.TokenizeRequest,
    "Detokenize": gateway_pb2.DetokenizeRequest,
}
# What a refusal may be; DEADLINE_EXCEEDED only where the request itself is long, see below.
FINE = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNIMPLEMENTED,
}


@st.composite
def calls(draw: st.DrawFn) -> tuple[str, list]:
    """A method and what is sent to it; generations that are valid end soon."""
    method = draw(st.sampled_from(sorted(METHODS)))
    kind = METHODS[method].DESCRIPTOR
    count = draw(st.integers(1, 4)) if method == "GenerateSession" else 1
    sent = [draw(messages(kind)) for _ in range(count)]
    for message in sent:
        generation = getattr(message, "generation", None)
        if method == "GenerateSession":
            generation = message.open.generation if message.WhichOneof("command") == "open" else None
        if generation is not None and not generation.HasField("max_tokens"):
            generation.max_tokens = 4
        if generation is not None and generation.max_tokens > 16:
            generation.max_tokens = 16
    return method, sent


class Sender:
    """Sends what was drawn, and keeps count."""

    def __init__(self, target: str) -> None:
        self.channel = grpc.insecure_channel(target)
        self.stub = gateway_pb2_grpc.GatewayServiceStub(self.channel)
        self.count = 0

    def send(self, method: str, sent: list) -> grpc.StatusCode:
        self.count += 1
        call = getattr(self.stub, method)
        try:
            if method == "GenerateSession":
                for _ in call(iter([*sent, gateway_pb2.GenerateSessionRequest(cancel={})]), timeout=TIMEOUT_S):
                    pass
            elif method == "GenerateStream":
                for _ in call(sent[0], timeout=TIMEOUT_S):
                    pass
            else:
                call(sent[0], timeout=TIMEOUT_S)
        except grpc.RpcError as failure:
            error = error_of_call(failure)
            if failure.code() is grpc.StatusCode.INVALID_ARGUMENT:
                assert error.field, error.message
                assert len(error.message.encode()) <= errors.MAX_MESSAGE_BYTES
            return failure.code()
        return grpc.StatusCode.OK


@pytest.mark.timeout(3600)
def test_anything_is_answered(tiny_pipeline):
    """No INTERNAL and no silence, a field is named; what streams beside it stays the same, and nothing is left."""
    before = tiny_pipeline.baseline()
    wanted = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 200, "ignore_eos": True}
    client = tiny_pipeline.client()
    alone = client.stream(**wanted).read_all().text
    beside: set[str] = set()
    stop = threading.Event()

    def keep_streaming() -> None:
        while not stop.is_set():
            beside.add(client.stream(**wanted).read_all().text)

    streaming = threading.Thread(target=keep_streaming)
    streaming.start()
    sender = Sender(tiny_pipeline.target)

    @settings(
        max_examples=REQUESTS, deadline=None, database=None, derandomize=REQUESTS <= 300,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(calls())
    def fuzz(drawn: tuple[str, list]) -> None:
        code = sender.send(*drawn)
        assert code is grpc.StatusCode.OK or code in FINE, code

    try:
        fuzz()
    finally:
        stop.set()
        streaming.join()
        sender.channel.close()
    assert sender.count >= REQUESTS
    assert beside == {alone}
    assert tiny_pipeline.baseline()[:4] == before[:4]
    client.close()
