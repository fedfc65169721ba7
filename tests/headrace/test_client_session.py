"""Guarantees of resumable streams and exact credits in the asyncio client."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace

import grpc
import pytest

from headrace import AsyncClient, errors
from headrace.answers import by_transport
from tests.headrace.scripted_gateway import Endpoint, ScriptedGateway, endpoint
from tests.headrace.scripted_session import BEFORE_OPENED

TEXTS = ["The ", "capital ", "is ", "Paris", "."]
WHOLE = "".join(TEXTS)
AFTER_FINAL = len(TEXTS) + 1


@pytest.fixture
async def gateway() -> ScriptedGateway:
    gateway = ScriptedGateway()
    gateway.texts = list(TEXTS)
    return gateway


@pytest.fixture
async def served(gateway: ScriptedGateway) -> AsyncIterator[Endpoint]:
    async with endpoint(gateway) as served:
        yield served


@pytest.fixture
async def client(served: Endpoint) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(served.target) as client:
        yield client


async def soon(what: Awaitable[object]) -> None:
    await asyncio.wait_for(what, 10)


async def test_undisturbed(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """A resumable stream is a stream: the same deltas and answer, and a name to resume it by."""
    async with client.stream("hi", resumable=True, window=8, request_id="mine") as stream:
        assert stream.last_sequence_number == -1
        deltas = [delta async for delta in stream]
    assert "".join(delta.text for delta in deltas) == stream.answer.text == WHOLE
    assert [delta.sequence_number for delta in deltas] == [0, 1, 2, 3, 4]
    assert (stream.stream_id, stream.resume_count, stream.last_sequence_number) == ("stream-1", 0, 5)
    opening = gateway.session_calls[0].first.open
    assert (opening.credit_count, opening.generation.resumable, opening.generation.request_id) == (8, True, "mine")
    assert gateway.goodbyes.empty()


@pytest.mark.parametrize("window", [1, 3, 64])
@pytest.mark.parametrize("index", range(BEFORE_OPENED, AFTER_FINAL + 1))
async def test_connection_dropped_at_every_message(
    client: AsyncClient, gateway: ScriptedGateway, index: int, window: int
) -> None:
    """Wherever the connection breaks, every delta comes once, in order; what was generated twice is not asked for."""
    gateway.drop_at = [index]
    stream = client.stream("hi", resumable=True, window=window)
    assert [delta.text async for delta in stream] == TEXTS
    assert stream.answer.text == WHOLE
    lost = BEFORE_OPENED < index < AFTER_FINAL
    assert stream.resume_count == (1 if lost else 0)
    assert [call.first.WhichOneof("command") for call in gateway.session_calls[1:]] == (
        ["resume"] if lost else [] if index == AFTER_FINAL else ["open"]
    )
    if lost:
        assert gateway.session_calls[1].first.resume.last_sequence_number == index - 1
    assert gateway.most_ahead <= window


async def test_dropped_again_and_again(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """Any number of losses is survived, also those of a connection that brought nothing."""
    gateway.drop_at = [0, BEFORE_OPENED, 0, 1, 2, 2, 3, 5, 5]
    stream = client.stream("hi", resumable=True, window=2)
    assert [delta.text async for delta in stream] == TEXTS
    assert stream.resume_count == 8


@pytest.mark.parametrize("index", range(AFTER_FINAL))
async def test_server_vanishes(client: AsyncClient, gateway: ScriptedGateway, served: Endpoint, index: int) -> None:
    """A server that is gone and comes back on the same port: nothing is lost and nothing doubled."""
    gateway.hold_at = [index]
    stream = client.stream("hi", resumable=True)
    reading = asyncio.create_task(stream.read_all())
    await soon(gateway.held.wait())
    await served.stop()
    await served.start()
    answer = await asyncio.wait_for(reading, 20)
    assert answer.text == WHOLE
    assert len(gateway.session_calls) == 2


@pytest.mark.parametrize("resend", [1, 2, 10])
async def test_resent_messages_are_dropped(client: AsyncClient, gateway: ScriptedGateway, resend: int) -> None:
    """A server that repeats itself is heard once, and gets no credits for it."""
    gateway.drop_at, gateway.resend = [3], resend
    stream = client.stream("hi", resumable=True, window=2)
    assert [delta.text async for delta in stream] == TEXTS
    assert gateway.most_ahead <= 2


async def test_a_gap_is_an_error(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """A missing message is Internal; the deltas before it were delivered, and the generation is ended."""
    gateway.skip, gateway.endless = 2, True
    stream = client.stream("hi", resumable=True)
    texts = []
    with pytest.raises(errors.Internal, match=r"message 3 .* where 2 was expected"):  # noqa: PT012
        async for delta in stream:
            texts.append(delta.text)  # noqa: PERF401 - what came before counts
    assert texts == TEXTS[:2]
    await soon(gateway.goodbyes.get())


@pytest.mark.parametrize(
    "refusal",
    [
        errors.Aborted("another reader has the stream"),
        errors.NotFound("expired", reason=errors.Reason.STREAM_NOT_FOUND),
        errors.InvalidArgument("never sent", field="resume.last_sequence_number"),
    ],
)
async def test_a_refused_resume(client: AsyncClient, gateway: ScriptedGateway, refusal: errors.HeadraceError) -> None:
    """What the server says of a resume comes out as its class, at once."""
    gateway.drop_at, gateway.refuse_resume = [2], refusal
    with pytest.raises(type(refusal)) as caught:
        await client.stream("hi", resumable=True).read_all()
    assert caught.value.reason == refusal.reason
    assert len(gateway.session_calls) == 2


async def test_slow_consumer(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """A stream that the server ended is not resumed by itself; `resume` goes on with it after its last number."""
    gateway.error, gateway.fail_after = errors.ResourceExhausted("slow", reason=errors.Reason.SLOW_CONSUMER), 2
    stream = client.stream("hi", resumable=True)
    with pytest.raises(errors.ResourceExhausted) as caught:
        await stream.read_all()
    assert caught.value.reason == "SLOW_CONSUMER"
    assert len(gateway.session_calls) == 1
    gateway.error = None
    rest = client.resume(stream.stream_id, stream.last_sequence_number)
    assert [delta.text async for delta in rest] == TEXTS[2:]


async def test_resume_by_name(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """A process that remembers the name alone gets everything, and survives losses too."""
    gateway.drop_at = [3]
    stream = client.resume("stream-1", window=5)
    assert [delta.text async for delta in stream] == TEXTS
    first, second = (call.first.resume for call in gateway.session_calls)
    assert (first.stream_id, first.last_sequence_number, first.credit_count) == ("stream-1", -1, 5)
    assert (second.last_sequence_number, stream.resume_count) == (2, 1)
    with pytest.raises(errors.InvalidArgument):
        client.resume("")


async def test_without_resuming(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """`window` alone is a session with exact credits that ends with its connection."""
    gateway.drop_at = [2]
    stream = client.stream("hi", window=4)
    with pytest.raises(errors.Unavailable):
        await stream.read_all()
    assert stream.stream_id == ""
    assert len(gateway.session_calls) == 1
    assert not gateway.session_calls[0].first.open.generation.resumable


@pytest.mark.parametrize(("window", "tokens"), [(1, 1), (4, 1), (16, 4), (64, 8)])
async def test_a_slow_taker_holds_the_server_back(
    client: AsyncClient, gateway: ScriptedGateway, window: int, tokens: int
) -> None:
    """While the caller does not come back, at most `window` tokens beyond what it took are sent."""
    gateway.endless, gateway.tokens_a_message = True, tokens
    stream = client.stream("hi", window=window)
    for taken in range(1, 20):
        await anext(stream)
        await soon(gateway.starved.wait())
        sent = gateway.session_calls[0].sent
        assert sent <= window + (taken - 1) * tokens
        assert gateway.most_ahead <= window
    await stream.aclose()


async def _break(client: AsyncClient) -> None:
    stream = client.stream("hi", resumable=True)
    async for _ in stream:
        break


async def _raise(client: AsyncClient) -> None:
    async def read() -> None:
        async for _ in client.stream("hi", resumable=True):
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await read()


async def _drop(client: AsyncClient) -> None:
    stream = client.stream("hi", resumable=True)
    await anext(stream)
    del stream
    gc.collect()


async def _leave(client: AsyncClient) -> None:
    async with client.stream("hi", resumable=True) as stream:
        await anext(stream)


async def _cancel(client: AsyncClient) -> None:
    """Cancelled while it waits for a message: grpc takes the call along, so goodbye needs a new one."""
    stream = client.stream("hi", resumable=True, window=1)
    await anext(stream)

    async def read() -> None:
        await anext(stream)
        await asyncio.Event().wait()

    task = asyncio.create_task(read())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await stream.aclose()


async def _close_elsewhere(client: AsyncClient) -> None:
    stream = client.stream("hi", resumable=True)
    seen = asyncio.Event()

    async def read() -> None:
        while True:
            await anext(stream)
            seen.set()

    task = asyncio.create_task(read())
    await seen.wait()
    await stream.aclose()
    with pytest.raises((errors.Cancelled, StopAsyncIteration, RuntimeError)):
        await task


@pytest.mark.parametrize("way", [_break, _raise, _drop, _leave, _cancel, _close_elsewhere])
async def test_every_way_out_says_goodbye(
    client: AsyncClient, gateway: ScriptedGateway, way: Callable[[AsyncClient], Awaitable[None]]
) -> None:
    """However a resumable stream is left early, the server is told to end it: a lost connection would not."""
    gateway.endless = True
    await way(client)
    await soon(gateway.goodbyes.get())


async def test_close_while_there_is_no_server(client: AsyncClient, gateway: ScriptedGateway, served: Endpoint) -> None:
    """Closing a stream that tries to get back wakes its reader with Cancelled, at once."""
    gateway.hold_at = [1]
    stream = client.stream("hi", resumable=True)
    assert (await anext(stream)).text == TEXTS[0]
    task = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
    await soon(gateway.held.wait())
    await served.stop()
    await soon(stream.aclose())
    with pytest.raises((errors.Cancelled, StopAsyncIteration, RuntimeError)):
        await task


async def test_the_client_closed(served: Endpoint, gateway: ScriptedGateway) -> None:
    """A stream whose client was closed ends as Cancelled instead of trying for ever."""
    gateway.hold_at = [1]
    client = AsyncClient(served.target)
    stream = client.stream("hi", resumable=True)
    await anext(stream)
    await client.close()
    with pytest.raises(errors.Cancelled):
        await anext(stream)


async def test_nobody_listens() -> None:
    """Without a server a resumable stream tries for as long as `resume_timeout` or the deadline says."""
    async with AsyncClient("127.0.0.1:1") as client:
        with pytest.raises(errors.Unavailable):
            await client.stream("hi", resumable=True, resume_timeout=0.1).read_all()
        with pytest.raises((errors.DeadlineExceeded, errors.Unavailable)):
            await client.stream("hi", resumable=True, timeout=0.2).read_all()
        with pytest.raises(errors.Unavailable):
            await client.stream("hi", window=4).read_all()


async def test_deadline(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """`timeout` is one deadline over all connections."""
    gateway.drop_at, gateway.hold_at = [1], [9, 2]
    with pytest.raises(errors.DeadlineExceeded):
        await client.stream("hi", resumable=True, timeout=0.5).read_all()
    assert len(gateway.session_calls) == 2


async def test_options(client: AsyncClient) -> None:
    """Options of sessions belong to `stream`; unknown ones are refused."""
    with pytest.raises(TypeError, match="resumable"):
        await client.generate("hi", resumable=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="windows"):
        client.stream("hi", windows=3)  # type: ignore[call-arg]
    with pytest.raises(errors.InvalidArgument):
        client.stream("hi", window=1 << 40)


async def test_a_late_grant_changes_nothing(client: AsyncClient, gateway: ScriptedGateway) -> None:
    """Credits for a call that the server has ended do not hide its messages or its status, as grpc.aio's own do."""
    for _ in range(100):
        stream = client.stream("hi", window=3)
        assert [delta.text async for delta in stream] == TEXTS
    gateway.error, gateway.fail_after = errors.ResourceExhausted("slow", reason=errors.Reason.SLOW_CONSUMER), 3
    for _ in range(100):
        with pytest.raises(errors.ResourceExhausted):
            await client.stream("hi", window=3).read_all()


@pytest.mark.parametrize("many", [50])
async def test_many_at_once(client: AsyncClient, gateway: ScriptedGateway, many: int) -> None:
    """Streams of one client share a connection and do not disturb one another."""
    gateway.drop_at = [n % 7 - 1 for n in range(many)]
    streams = [client.stream("hi", resumable=True, window=2) for _ in range(many)]
    answers = await asyncio.gather(*(stream.read_all() for stream in streams))
    assert {answer.text for answer in answers} == {WHOLE}


def failure(code: grpc.StatusCode, *trailing: tuple[str, object]) -> SimpleNamespace:
    return SimpleNamespace(code=lambda: code, trailing_metadata=lambda: trailing)


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        (failure(grpc.StatusCode.UNAVAILABLE), True),
        (failure(grpc.StatusCode.UNAVAILABLE, (errors.STATUS_DETAILS_KEY, b"")), True),
        (failure(grpc.StatusCode.INTERNAL), True),
        (failure(grpc.StatusCode.UNKNOWN), True),
        (failure(grpc.StatusCode.CANCELLED), True),
        (failure(grpc.StatusCode.INTERNAL, (errors.STATUS_DETAILS_KEY, b"")), False),
        (failure(grpc.StatusCode.CANCELLED, (errors.STATUS_DETAILS_KEY, b"")), False),
        (failure(grpc.StatusCode.INVALID_ARGUMENT), False),
        (failure(grpc.StatusCode.DEADLINE_EXCEEDED), False),
        (failure(grpc.StatusCode.NOT_FOUND), False),
    ],
)
def test_what_a_lost_connection_looks_like(failed: SimpleNamespace, expected: bool) -> None:
    """UNAVAILABLE, and what gRPC makes of a broken connection; never a status that one of ours gave."""
    assert by_transport(failed) is expected
