"""Guarantees of the blocking client, against a server on an event loop of another thread."""

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from headrace import Client, errors
from tests.headrace.scripted_gateway import TRACE_ID, Endpoint, ScriptedGateway

T = TypeVar("T")


class Server:
    """A scripted gateway that runs on its own thread."""

    def __init__(self) -> None:
        self.gateway = ScriptedGateway()
        self._endpoint = Endpoint(self.gateway)
        self._loop = asyncio.new_event_loop()
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._ready.wait(10)

    @property
    def target(self) -> str:
        return self._endpoint.target

    async def _serve(self) -> None:
        await self._endpoint.start()
        self._ready.set()
        await self._stop.wait()
        await self._endpoint.stop()

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """Runs something on the server's event loop."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(what, 10), self._loop).result(15)

    def ending(self) -> str:
        """How the next stream handler ended."""
        return self.run(self.gateway.ended.get())

    def restart(self) -> None:
        """Breaks every connection off, and serves on the same port again."""
        self.run(self._endpoint.stop())
        self.run(self._endpoint.start())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        self._loop.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.target) as client:
        assert client.wait_until_connected(10)
        yield client


def test_answers(client: Client) -> None:
    """Unary and streamed answers carry the same text and the ids."""
    unary = client.generate("hi")
    with client.stream(messages=[("user", "hi")]) as stream:
        deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == stream.answer.text == unary.text
    assert stream.answer.trace_id == unary.trace_id == TRACE_ID
    assert client.stream("hi").read_all().text == unary.text


def test_from_many_threads(client: Client) -> None:
    """One client serves any number of threads at the same time."""
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda number: client.stream("hi", request_id=str(number)).read_all(), range(64)))
    assert [answer.request_id for answer in answers] == [str(number) for number in range(64)]
    assert {answer.text for answer in answers} == {"The capital is Paris."}


def _break(client: Client) -> None:
    stream = client.stream("hi")
    for _ in stream:
        break
    assert list(stream) == []  # the loop that was left has ended the call


def _raise(client: Client) -> None:
    def read() -> None:
        for _ in client.stream("hi"):
            raise KeyError("mine")

    with pytest.raises(KeyError):
        read()


def _drop(client: Client) -> None:
    stream = client.stream("hi")
    next(stream)
    del stream
    gc.collect()


def _leave(client: Client) -> None:
    with client.stream("hi") as stream:
        next(stream)
        next(stream)


@pytest.mark.parametrize("way", [_break, _raise, _drop, _leave])
def test_every_way_out_cancels(server: Server, client: Client, way: Callable[[Client], None]) -> None:
    """Break, exception, drop and the end of `with` each end the generation."""
    server.gateway.endless = True
    way(client)
    assert server.ending() == "cancelled"


def test_close_from_another_thread(server: Server, client: Client) -> None:
    """Closing a stream wakes the thread that reads it with Cancelled."""
    server.gateway.endless = True
    stream = client.stream("hi")
    seen = threading.Event()

    def read() -> str:
        try:
            while True:
                next(stream)
                seen.set()
        except errors.Cancelled:
            return "cancelled"
        except StopIteration:
            return "stopped"

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        assert seen.wait(10)
        stream.close()
        assert reader.result(10) in ("cancelled", "stopped")
    assert server.ending() == "cancelled"


def test_typed_errors(server: Server, client: Client) -> None:
    """Errors arrive as their classes, unary and streamed; tokens before an error are delivered."""
    server.gateway.error, server.gateway.fail_after = errors.InvalidArgument("bad", field="generation.n"), 1
    with pytest.raises(errors.InvalidArgument) as caught:
        client.generate("hi")
    assert (caught.value.field, caught.value.request_id) == ("generation.n", "server-id")
    stream = client.stream("hi")
    assert next(stream).text == "The "
    with pytest.raises(errors.InvalidArgument):
        next(stream)


def test_deadline(server: Server, client: Client) -> None:
    """`timeout` ends a stream with DeadlineExceeded."""
    server.gateway.endless = True
    with pytest.raises(errors.DeadlineExceeded):
        client.stream("hi", timeout=0.2).read_all()


def test_other_calls(client: Client) -> None:
    """Tokenize, Detokenize, ListModels and GetStats."""
    assert client.tokenize("hi") == [1, 2, 3]
    assert client.detokenize([1]) == "abc"
    assert client.list_models()[0].name == "tiny"
    assert client.get_stats(timeout=5).engines[1].reachable is False


def test_nobody_listens() -> None:
    """A gateway that is not there: no connection, and calls are Unavailable."""
    with Client("127.0.0.1:1") as client:
        assert not client.wait_until_connected(0.2)
        with pytest.raises(errors.Unavailable):
            client.list_models()
