"""Callers that mean harm, or do not know better: others are unaffected."""

from __future__ import annotations

import contextlib
import socket

import grpc
import pytest

from headrace import errors
from tests.pipeline.conftest import until

SESSION = "/headrace.v1.GatewayService/GenerateSession"
GENERATE = "/headrace.v1.GatewayService/Generate"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def raw(channel: grpc.Channel, payload: bytes, **arguments) -> grpc.RpcError:
    """How a call with these bytes fails."""
    call = channel.unary_unary(GENERATE, request_serializer=bytes, response_deserializer=bytes)
    with pytest.raises(grpc.RpcError) as caught:
        call(payload, timeout=10, **arguments)
    return caught.value


def answer(client) -> str:
    return client.generate("Once upon", max_tokens=8, ignore_eos=True, temperature=0, timeout=20).text


def test_headers_of_20_kb(tiny_pipeline):
    """Refused with a status, and the next call on the same connection is answered."""
    with tiny_pipeline.client() as client, grpc.insecure_channel(tiny_pipeline.target) as channel:
        wanted = answer(client)
        for metadata in (
            (("authorization", "Bearer " + "k" * 20_000),),
            tuple((f"k{n}", "v" * 90) for n in range(220)),
        ):
            failure = raw(channel, b"", metadata=metadata)
            assert failure.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
        assert raw(channel, b"").code() is grpc.StatusCode.INVALID_ARGUMENT
        assert answer(client) == wanted


@pytest.mark.parametrize(
    "payload",
    [b"\x0a\x04\x0a\x02\xff\xfe", b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x80" * 5000],
    ids=["text that is not UTF-8", "no message", "a length beyond the end", "cut off"],
)
def test_bytes_that_are_no_message(tiny_pipeline, payload):
    """INVALID_ARGUMENT, alone and in a stream of requests."""
    with tiny_pipeline.client() as client, grpc.insecure_channel(tiny_pipeline.target) as channel:
        wanted = answer(client)
        assert raw(channel, payload).code() is grpc.StatusCode.INVALID_ARGUMENT
        session = channel.stream_stream(SESSION, request_serializer=bytes, response_deserializer=bytes)
        with pytest.raises(grpc.RpcError) as caught:
            next(session(iter([payload]), timeout=10))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert answer(client) == wanted


def test_a_thousand_idle_connections(tiny_pipeline):
    """Half of them say nothing at all, half begin and stop: calls on others are answered as before."""
    host, port = tiny_pipeline.target.rsplit(":", 1)
    with contextlib.ExitStack() as stack, tiny_pipeline.client() as client:
        wanted = answer(client)
        for number in range(1000):
            idle = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
            if number % 2:
                idle.sendall(PREFACE[: 10 + number % 30])
        assert answer(client) == wanted
        with tiny_pipeline.client() as newcomer:
            assert answer(newcomer) == wanted


def test_calls_that_are_opened_and_left(tiny_pipeline):
    """Sessions that never say what they want cost nothing once they are gone."""
    before = tiny_pipeline.baseline()
    with grpc.insecure_channel(tiny_pipeline.target) as channel:
        session = channel.stream_stream(SESSION, request_serializer=bytes, response_deserializer=bytes)
        opened = [session(iter_for_ever(), timeout=30) for _ in range(50)]
        with tiny_pipeline.client() as client:
            assert answer(client)
        for call in opened:
            call.cancel()
    until(lambda: tiny_pipeline.baseline()[:4] == before[:4], 10, "nothing is left")


def iter_for_ever():
    """Requests that never come."""
    import threading

    threading.Event().wait(2)
    yield from ()


def test_an_error_never_holds_the_prompt(tiny_pipeline):
    """Whatever is wrong with it, the text stays with its owner."""
    secret = "my-very-secret-prompt"
    with tiny_pipeline.client() as client:
        for options in (
            {"stop": [""]},
            {"max_tokens": 0},
            {"temperature": -1},
            {"model": "gpt-9"},
            {"stop": [secret * 99]},
        ):
            with pytest.raises(errors.HeadraceError) as caught:
                client.generate(secret, **options)
            assert secret not in caught.value.message
