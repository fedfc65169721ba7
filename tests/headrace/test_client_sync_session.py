"""Guarantees of resumable streams and exact credits in the blocking client."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace import Client, errors
from headrace.sync_stream import Stream
from tests.headrace.scripted_session import BEFORE_OPENED
from tests.headrace.test_client_sync import Server

TEXTS = ["The ", "capital ", "is ", "Paris", "."]
WHOLE = "".join(TEXTS)
AFTER_FINAL = len(TEXTS) + 1


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    server.gateway.texts = list(TEXTS)
    yield server
    server.close()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.target) as client:
        assert client.wait_until_connected(10)
        yield client


@pytest.mark.parametrize("index", range(BEFORE_OPENED, AFTER_FINAL + 1))
def test_connection_dropped_at_every_message(client: Client, server: Server, index: int) -> None:
    """Wherever the connection breaks, every delta comes once, in order."""
    server.gateway.drop_at = [index]
    stream = client.stream("hi", resumable=True, window=2)
    assert [delta.text for delta in stream] == TEXTS
    assert stream.answer.text == WHOLE
    assert stream.resume_count == (1 if BEFORE_OPENED < index < AFTER_FINAL else 0)
    assert server.gateway.most_ahead <= 2


@pytest.mark.parametrize("index", range(AFTER_FINAL))
def test_server_vanishes(client: Client, server: Server, index: int) -> None:
    """A server that is gone and comes back on the same port: nothing is lost and nothing doubled."""
    server.gateway.hold_at = [index]
    stream = client.stream("hi", resumable=True)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream.read_all)
        server.run(server.gateway.held.wait())
        server.restart()
        assert reading.result(20).text == WHOLE
    assert (stream.stream_id, stream.last_sequence_number) == ("stream-1", 5)


def test_from_several_threads(client: Client, server: Server) -> None:
    """Threads share a client; each stream resumes on its own."""
    server.gateway.drop_at = [number % 7 - 1 for number in range(40)]

    def read(_: int) -> str:
        return client.stream("hi", resumable=True, window=2).read_all().text

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read, range(32))) == {WHOLE}


def test_a_slow_taker_holds_the_server_back(client: Client, server: Server) -> None:
    """While the caller does not come back, at most `window` tokens beyond what it took are sent."""
    gateway = server.gateway
    gateway.endless = True
    with client.stream("hi", window=4) as stream:
        for taken in range(1, 20):
            next(stream)
            server.run(gateway.starved.wait())
            assert gateway.session_calls[0].sent <= 4 + taken - 1
    assert gateway.most_ahead <= 4


def test_typed_errors(client: Client, server: Server) -> None:
    """A superseded, an unknown and a slow reader each get their own error; a gap is Internal."""
    gateway = server.gateway
    for refusal in (errors.Aborted("superseded"), errors.NotFound("x", reason=errors.Reason.STREAM_NOT_FOUND)):
        gateway.drop_at, gateway.refuse_resume = [1], refusal
        with pytest.raises(type(refusal)) as caught:
            client.stream("hi", resumable=True).read_all()
        assert caught.value.reason == refusal.reason
    gateway.refuse_resume = None
    gateway.error, gateway.fail_after = errors.ResourceExhausted("x", reason=errors.Reason.SLOW_CONSUMER), 2
    stream = client.stream("hi", resumable=True)
    with pytest.raises(errors.ResourceExhausted):
        stream.read_all()
    gateway.error = None
    assert client.resume(stream.stream_id, stream.last_sequence_number).read_all().text == "".join(TEXTS[2:])
    gateway.skip, gateway.endless = 1, True  # so that there is a generation to end
    with pytest.raises(errors.Internal):
        client.stream("hi", resumable=True).read_all()
    server.run(gateway.goodbyes.get())


def _break(stream: Stream) -> None:
    for _ in stream:
        break


def _raise(stream: Stream) -> None:
    def read() -> None:
        for _ in stream:
            raise KeyError("mine")

    with pytest.raises(KeyError):
        read()


def _drop(stream: Stream) -> None:
    next(stream)
    del stream
    gc.collect()


def _leave(stream: Stream) -> None:
    with stream:
        next(stream)


def _close_elsewhere(stream: Stream) -> None:
    seen = threading.Event()

    def read() -> str:
        try:
            while True:
                next(stream)
                seen.set()
        except (errors.Cancelled, StopIteration) as end:
            return type(end).__name__

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        assert seen.wait(10)
        stream.close()
        assert reader.result(10)


@pytest.mark.parametrize("way", [_break, _raise, _drop, _leave, _close_elsewhere])
def test_every_way_out_says_goodbye(client: Client, server: Server, way: Callable[[Stream], None]) -> None:
    """However a resumable stream is left early, the server is told to end it."""
    server.gateway.endless = True
    way(client.stream("hi", resumable=True))
    server.run(server.gateway.goodbyes.get())


def test_close_while_there_is_no_server(server: Server) -> None:
    """Closing a stream that tries to get back wakes its reader with Cancelled."""
    with Client("127.0.0.1:1") as client, ThreadPoolExecutor(1) as pool:
        stream = client.stream("hi", resumable=True)
        reader = pool.submit(stream.read_all)
        stream.close()
        with pytest.raises((errors.Cancelled, RuntimeError)):
            reader.result(10)


def test_the_client_closed(server: Server) -> None:
    """A stream whose client was closed ends as Cancelled."""
    server.gateway.hold_at = [1]
    client = Client(server.target)
    stream = client.stream("hi", resumable=True)
    next(stream)
    client.close()
    with pytest.raises(errors.Cancelled):
        next(stream)


def test_no_thread_is_left(client: Client, server: Server) -> None:
    """Threads of grpc end with their calls, however those end."""
    server.gateway.drop_at = [1, 2]
    before = set(threading.enumerate())
    for _ in range(3):
        client.stream("hi", resumable=True).read_all()
    with client.stream("hi", resumable=True) as stream:
        next(stream)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


def test_nobody_listens() -> None:
    """Without a server a resumable stream tries for as long as `resume_timeout` says."""
    with Client("127.0.0.1:1") as client, pytest.raises(errors.Unavailable):
        client.stream("hi", resumable=True, resume_timeout=0.1).read_all()
