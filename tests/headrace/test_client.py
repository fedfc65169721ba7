"""Guarantees of the asyncio client."""

import asyncio
import gc
from collections.abc import AsyncIterator

import grpc
import pytest

import headrace
from headrace import AsyncClient, FinishReason, errors
from tests.headrace.scripted_gateway import TIMINGS, TRACE_ID, ScriptedGateway, serving


@pytest.fixture
async def gateway() -> ScriptedGateway:
    return ScriptedGateway()


@pytest.fixture
async def client(gateway: ScriptedGateway) -> AsyncIterator[AsyncClient]:
    async with serving(gateway) as target, AsyncClient(target) as client:
        yield client


async def ending(gateway: ScriptedGateway) -> str:
    return await asyncio.wait_for(gateway.ended.get(), 10)


async def test_unary_answer(client: AsyncClient) -> None:
    """A unary answer carries text, ending, usage, receipt and ids."""
    answer = await client.generate("hi", metadata={"team": "a"})
    assert answer.text == "The capital is Paris."
    assert (answer.finish_reason, answer.matched_token_id, answer.matched_stop) == (FinishReason.STOP, 2, None)
    assert (answer.request_id, answer.trace_id, answer.model) == ("server-id", TRACE_ID, "tiny")
    assert answer.usage.completion_token_count == 3
    assert answer.timings == TIMINGS
    assert answer.metadata == {"team": "a"}


async def test_streamed_answer(client: AsyncClient) -> None:
    """The deltas join to the text of the answer that the stream ends with."""
    async with client.stream("hi") as stream:
        with pytest.raises(RuntimeError):
            _ = stream.answer
        deltas = [delta async for delta in stream]
    assert [delta.sequence_number for delta in deltas] == [0, 1, 2]
    assert "".join(delta.text for delta in deltas) == stream.answer.text == "The capital is Paris."
    assert stream.answer.token_ids == (100, 101, 102)
    assert (stream.answer.matched_stop, stream.answer.trace_id) == ("!", TRACE_ID)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_read_all(client: AsyncClient) -> None:
    """`read_all` gives the answer without looking at the deltas."""
    assert (await client.stream("hi").read_all()).text == "The capital is Paris."


async def test_break_cancels(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """Breaking out of the loop ends the generation, though the stream is still referred to."""
    gateway.endless = True
    stream = client.stream("hi")
    async for _ in stream:
        break
    assert await ending(gateway) == "cancelled"
    del stream


async def test_exception_in_the_loop_cancels(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """An exception in the body of the loop ends the generation."""
    gateway.endless = True

    async def read() -> None:
        async for _ in client.stream("hi"):
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await read()
    assert await ending(gateway) == "cancelled"


@pytest.mark.parametrize("read_first", [False, True])
async def test_drop_cancels(client: AsyncClient, gateway: ScriptedGateway, read_first: bool) -> None:
    """Forgetting a stream ends the generation, whether or not it was read."""
    gateway.endless = True
    stream = client.stream("hi")
    if read_first:
        await anext(stream)
    else:
        await gateway.asked.wait()
    del stream
    gc.collect()
    assert await ending(gateway) == "cancelled"


async def test_task_cancellation_cancels(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """Cancelling the task that reads ends the generation, and the task is cancelled."""
    gateway.endless = True
    started = asyncio.Event()

    async def read() -> None:
        async for _ in client.stream("hi"):
            started.set()

    task = asyncio.create_task(read())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await ending(gateway) == "cancelled"


async def test_cancelled_unary_call(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """Cancelling the task that waits for a unary answer ends the generation."""
    gateway.endless = True
    task = asyncio.create_task(client.generate("hi"))
    await gateway.asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await ending(gateway) == "cancelled"


async def test_close_from_another_task(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """`aclose` wakes a reader with Cancelled, not with the cancellation of its task."""
    gateway.texts, gateway.endless = ["x"], True
    stream = client.stream("hi")

    async def read() -> None:
        while True:
            await anext(stream)

    task = asyncio.create_task(read())
    await gateway.asked.wait()
    await stream.aclose()
    with pytest.raises((errors.Cancelled, StopAsyncIteration, RuntimeError)):
        await task


async def test_typed_error(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """A refusal arrives as its class, with reason, field, retry delay and request id."""
    gateway.error = errors.ResourceExhausted("full", field="generation.priority", retry_after_s=1.5)
    with pytest.raises(errors.ResourceExhausted) as caught:
        await client.generate("hi")
    error = caught.value
    assert (error.reason, error.field, error.retry_after_s) == ("QUEUE_FULL", "generation.priority", 1.5)
    assert (error.message, error.request_id) == ("full", "server-id")
    assert isinstance(error, headrace.HeadraceError)


async def test_error_in_the_middle_of_a_stream(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """Deltas before an error are delivered; then the error comes out of the loop."""
    gateway.error, gateway.fail_after = errors.Unavailable("lost", reason=errors.Reason.SHUTTING_DOWN), 2
    texts = []

    async def read() -> None:
        async for delta in client.stream("hi"):
            texts.append(delta.text)  # noqa: PERF401 - what came before the error counts

    with pytest.raises(errors.Unavailable) as caught:
        await read()
    assert texts == ["The ", "capital is "]
    assert caught.value.reason == "SHUTTING_DOWN"


async def test_deadline(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """`timeout` is the call's deadline; it ends a stream with DeadlineExceeded."""
    gateway.endless = True
    with pytest.raises(errors.DeadlineExceeded):
        async for _ in client.stream("hi", timeout=0.2):
            pass
    with pytest.raises(errors.DeadlineExceeded):
        await client.generate("hi", timeout=0.1)


async def test_nobody_listens() -> None:
    """A gateway that is not there is Unavailable at once."""
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(errors.Unavailable):
            await client.list_models()


async def test_other_calls(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """Tokenize, Detokenize, ListModels and GetStats."""
    assert await client.tokenize("hi") == [1, 2, 3]
    assert await client.tokenize(messages=[("user", "hi")], timeout=5) == [1, 2, 3]
    assert gateway.requests[-1].chat.messages[0].content == "hi"
    assert await client.detokenize([1, 2], include_special_tokens=True) == "abc"
    assert gateway.requests[-1].include_special_tokens
    assert [model.name for model in await client.list_models()] == ["tiny"]
    assert (await client.get_stats()).engines[0].stats.running_count == 2


async def test_headers(gateway: ScriptedGateway) -> None:
    """Headers of the client and of the call are sent; the call's win."""
    async with serving(gateway) as target, AsyncClient(target, headers={"a": "1", "b": "1"}) as client:
        await client.generate("hi", headers={"b": "2"})
    assert gateway.headers[0]["a"] == "1"
    assert gateway.headers[0]["b"] == "2"


async def test_tls_credentials_are_used(gateway: ScriptedGateway) -> None:
    """With credentials the channel speaks TLS: a plain-text server is Unavailable."""
    tls = grpc.ssl_channel_credentials()
    async with serving(gateway) as target, AsyncClient(target, credentials=tls) as client:
        with pytest.raises(errors.Unavailable):
            await client.generate("hi", timeout=20)
    assert gateway.requests == []
