"""Every call ends with a status that means something, and its span ends exactly once."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import grpc.aio
import pytest
import structlog
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace import channels, errors
from headrace.answers import error_of as error_of_call
from headrace.v1 import gateway_pb2, gateway_pb2_grpc, generation_pb2
from services.common.calls import Call, CallInterceptor
from services.common.telemetry import Telemetry, TelemetrySettings

PROMPT = "a secret prompt"
MESSAGE = gateway_pb2.GenerateStreamResponse(delta=gateway_pb2.Delta(text="x" * 10_000))


class Scripted(gateway_pb2_grpc.GatewayServiceServicer):
    """Generate runs `script`; GenerateStream writes `count` messages, then runs it."""

    def __init__(self, script, count=0):
        self.script, self.count = script, count
        self.entered, self.left = asyncio.Event(), asyncio.Event()

    async def Generate(self, request, call: Call):
        self.entered.set()
        try:
            return await self.script(call)
        finally:
            self.left.set()

    async def GenerateStream(self, request, call: Call):
        self.entered.set()
        try:
            for number in range(self.count):
                await call.write(gateway_pb2.GenerateStreamResponse(sequence_number=number))
            await self.script(call)
        finally:
            self.left.set()


@asynccontextmanager
async def serving(servicer, refusal=lambda: None):
    exporter = InMemorySpanExporter()
    telemetry = Telemetry("test", TelemetrySettings(), exporter)
    interceptor = CallInterceptor(telemetry, structlog.get_logger(), refusal)
    server = grpc.aio.server(interceptors=[interceptor], options=channels.SERVER_OPTIONS)
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)
    stub.interceptor, stub.telemetry = interceptor, telemetry
    yield stub
    await channel.close()
    await server.stop(0)
    await interceptor.idle.wait()
    telemetry.shutdown()
    assert telemetry.counts.started == telemetry.counts.ended == len(exporter.get_finished_spans())


def request():
    return gateway_pb2.GenerateRequest(generation=generation_pb2.Generation(prompt=PROMPT))


async def failure(call) -> tuple[grpc.StatusCode, errors.HeadraceError]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = caught.value
    return error.code(), error_of_call(error)


async def read(stream):
    async for message in stream:
        assert message == MESSAGE


async def raising(error):
    raise error


@pytest.mark.parametrize("kind", errors.BY_CODE.values(), ids=lambda kind: kind.__name__)
async def test_each_error_of_the_catalogue_survives_the_wire(kind):
    """Code, reason, field, message and retry delay arrive as they were raised."""
    raised = kind("too large", field="generation.top_p", retry_after_s=1.5)
    async with serving(Scripted(lambda call: raising(raised))) as stub:
        _, error = await failure(stub.Generate(request()))
    assert type(error) is kind
    assert (error.message, error.reason, error.field) == ("too large", raised.reason, "generation.top_p")
    assert error.retry_after_s == 1.5


async def test_an_unexpected_exception_is_internal_and_tells_nothing():
    """A fault of ours: INTERNAL, with a trace id, without the exception's text."""
    async with serving(Scripted(lambda call: raising(KeyError(PROMPT)))) as stub:
        code, error = await failure(stub.Generate(request()))
    assert code is grpc.StatusCode.INTERNAL
    assert PROMPT not in error.message


async def test_of_tasks_that_fail_together_the_first_error_is_told():
    """Two refusals at once are the first of them, not INTERNAL; beside a fault of ours they are INTERNAL."""
    two = [errors.NotFound("no stream"), errors.InvalidArgument("not again", field="resume")]
    async with serving(Scripted(lambda call: raising(BaseExceptionGroup("", two)))) as stub:
        code, error = await failure(stub.Generate(request()))
    assert (code, error.message) == (grpc.StatusCode.NOT_FOUND, "no stream")
    async with serving(Scripted(lambda call: raising(BaseExceptionGroup("", [*two, KeyError("x")])))) as stub:
        code, _ = await failure(stub.Generate(request()))
    assert code is grpc.StatusCode.INTERNAL


async def test_an_inner_cancellation_does_not_leave_the_caller_hanging():
    """A task that was cancelled behind the handler is INTERNAL, not silence."""

    async def inner(call):
        task = asyncio.create_task(asyncio.sleep(3600))
        task.cancel()
        await task

    async with serving(Scripted(inner)) as stub:
        code, _ = await failure(stub.Generate(request(), timeout=5))
    assert code is grpc.StatusCode.INTERNAL


async def end_in_headers(call: Call):
    asyncio.get_running_loop().call_soon(call.end_by_shutdown)
    await call.send_headers((("headrace-trace-id", "1"),))


async def end_in_the_first_message(call: Call):
    asyncio.get_running_loop().call_soon(call.end_by_shutdown)
    await call.write(MESSAGE)


async def end_in_a_full_window(call: Call):
    while True:
        writing = asyncio.ensure_future(call.write(MESSAGE))
        if not (await asyncio.wait({writing}, timeout=0.5))[0]:
            call.end_by_shutdown()
            await writing


@pytest.mark.parametrize("script", [end_in_headers, end_in_the_first_message, end_in_a_full_window])
async def test_an_end_while_something_is_sent_has_its_status(script):
    """Whatever is on its way when the handler is ended: the caller reads it, then UNAVAILABLE (SHUTTING_DOWN)."""
    servicer = Scripted(script)
    async with serving(servicer) as stub:
        stream = stub.GenerateStream(gateway_pb2.GenerateStreamRequest(), timeout=10)
        await servicer.left.wait()
        _, error = await failure(read(stream))
    assert error.reason == "SHUTTING_DOWN"


async def test_a_long_message_is_cut():
    """Error text stays under 1 KB, so that it never replaces the status."""
    async with serving(Scripted(lambda call: raising(errors.InvalidArgument("ä" * 20_000, field="x" * 100)))) as stub:
        code, error = await failure(stub.Generate(request()))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert 500 < len(error.message.encode()) <= errors.MAX_MESSAGE_BYTES


async def test_refusal_while_not_ready():
    """Before SERVING and after SIGTERM no handler is entered."""
    servicer = Scripted(lambda call: raising(AssertionError))
    refusal = errors.Unavailable("starting", reason=errors.Reason.STARTING)
    async with serving(servicer, lambda: refusal) as stub:
        code, error = await failure(stub.Generate(request()))
    assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "STARTING")
    assert not servicer.entered.is_set()


@pytest.mark.parametrize("read", [0, 1])
async def test_the_callers_cancel_reaches_the_handler(read):
    """Cancelled before or after the first message: the handler's finally runs."""
    servicer = Scripted(lambda call: asyncio.sleep(3600), count=1)
    async with serving(servicer) as stub:
        stream = stub.GenerateStream(gateway_pb2.GenerateStreamRequest())
        await servicer.entered.wait()
        for _ in range(read):
            await stream.read()
        stream.cancel()
        async with asyncio.timeout(5):
            await servicer.left.wait()


async def test_a_cancel_reaches_a_handler_blocked_in_write():
    """A reader that never reads, then goes away: the blocked write ends."""
    servicer = Scripted(lambda call: asyncio.sleep(3600), count=10_000_000)
    async with serving(servicer) as stub:
        stream = stub.GenerateStream(gateway_pb2.GenerateStreamRequest())
        await servicer.entered.wait()
        stream.cancel()
        async with asyncio.timeout(5):
            await servicer.left.wait()


async def test_the_deadline_ends_the_handler():
    """The caller sees DEADLINE_EXCEEDED, and the handler is ended."""
    servicer = Scripted(lambda call: asyncio.sleep(3600))
    async with serving(servicer) as stub:
        code, _ = await failure(stub.Generate(request(), timeout=0.05))
        async with asyncio.timeout(5):
            await servicer.left.wait()
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_shutdown_ends_open_calls_with_unavailable():
    """At the end of the grace period each open call gets UNAVAILABLE (SHUTTING_DOWN), after what was sent."""
    servicer = Scripted(lambda call: asyncio.sleep(3600), count=3)
    async with serving(servicer) as stub:
        stream = stub.GenerateStream(gateway_pb2.GenerateStreamRequest())
        got = [(await stream.read()).sequence_number for _ in range(3)]
        for call in list(stub.interceptor.open):
            call.end_by_shutdown()
        code, error = await failure(stream.read())
    assert got == [0, 1, 2]
    assert (code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")


async def test_a_hundred_random_endings_end_their_spans():
    """Started == ended, whatever happened (checked by `serving` for every test here)."""
    endings = [
        lambda call: raising(errors.Internal("x")),
        lambda call: raising(ValueError()),
        lambda call: asyncio.sleep(3600),
        lambda call: asyncio.sleep(0, gateway_pb2.GenerateResponse()),
    ]
    count = iter(range(10**9))

    async def ending(call):
        return await endings[next(count) % 4](call)

    async with serving(Scripted(ending)) as stub:
        calls = [stub.Generate(request(), timeout=0.2) for _ in range(100)]
        for call in calls[::7]:
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert len(results) == 100
