"""A call that brought nothing is repeated where the server says that it can help; nothing else is."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace import AsyncClient, Client, errors
from headrace.credentials import channel_credentials
from headrace.retries import Retry
from tests.headrace.scripted_gateway import ScriptedGateway, serving
from tests.headrace.scripted_session import abort

EXAMPLE = Path(__file__).parents[2] / "examples" / "service.py"
BUSY = errors.ResourceExhausted("later", retry_after_s=0.01)
AWAY = errors.Unavailable("starting", retry_after_s=0.01)


class Flaky(ScriptedGateway):
    """Fails as often as it is told, then answers."""

    def __init__(self, *failures: errors.HeadraceError) -> None:
        super().__init__()
        self.failures = list(failures)

    async def _take(self, request: Any, context: Any, later: bool = False) -> None:
        await super()._take(request, context, later)
        if self.failures:
            await abort(context, self.failures.pop(0))


@pytest.mark.parametrize("streamed", [False, True])
async def test_it_is_tried_again_as_the_server_says(streamed: bool) -> None:
    """With the same headers; the answer is the same as at once."""
    gateway = Flaky(BUSY, AWAY)
    async with serving(gateway) as target, AsyncClient(target, retries=2, api_key="k") as client:
        answer = await (client.stream("x").read_all() if streamed else client.generate("x"))
        assert answer.text == "The capital is Paris."
    assert [headers["authorization"] for headers in gateway.headers] == ["Bearer k"] * 3


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_blocking_client_does_the_same(streamed: bool) -> None:
    """From a thread."""

    def ask(target: str) -> str:
        with Client(target, retries=2) as client:
            return (client.stream("x").read_all() if streamed else client.generate("x")).text

    async with serving(Flaky(BUSY, AWAY)) as target:
        assert await asyncio.to_thread(ask, target) == "The capital is Paris."


@pytest.mark.parametrize("failure", [errors.InvalidArgument("x"), errors.ResourceExhausted("x"), errors.Internal("x")])
async def test_what_cannot_help_is_not_repeated(failure: errors.HeadraceError) -> None:
    """A field at fault, a limit that has no time, a fault: once, and the caller hears of it."""
    gateway = Flaky(failure)
    async with serving(gateway) as target, AsyncClient(target, retries=5) as client:
        with pytest.raises(type(failure)):
            await client.generate("x")
    assert len(gateway.requests) == 1


async def test_a_stream_that_began_is_not_repeated() -> None:
    """Its reader has text already."""
    gateway = ScriptedGateway()
    gateway.error, gateway.fail_after = AWAY, 1
    async with serving(gateway) as target, AsyncClient(target, retries=5) as client:
        with pytest.raises(errors.Unavailable):
            await client.stream("x").read_all()
    assert len(gateway.requests) == 1


async def test_a_stream_that_waits_to_try_again_can_be_closed() -> None:
    """At once, from another thread too."""
    gateway = Flaky(errors.Unavailable("long", retry_after_s=25))

    def ask(target: str) -> str:
        with Client(target, retries=1) as client:
            stream = client.stream("x")
            threading.Timer(0.2, stream.close).start()
            with pytest.raises(errors.Cancelled):
                stream.read_all()
            return "closed"

    async with serving(gateway) as target:
        assert await asyncio.wait_for(asyncio.to_thread(ask, target), 10) == "closed"


def test_times() -> None:
    """The server's time is kept, without one it doubles at random; a deadline is never waited over."""
    now = [0.0]
    plain = Retry(3, None, lambda: now[0], lambda: 0.5)
    assert [plain.wait_s(errors.Unavailable("x")) for _ in range(4)] == [0.05, 0.1, 0.2, None]
    told = Retry(3, 10.0, lambda: now[0], lambda: 0.0)
    assert told.wait_s(errors.ResourceExhausted("x", retry_after_s=4)) == 4
    now[0] = 7.0
    assert told.timeout_s() == 3
    assert told.wait_s(errors.ResourceExhausted("x", retry_after_s=4)) is None
    assert Retry(3, None).wait_s(errors.Unavailable("x", retry_after_s=3600)) is None


def test_a_certificate_needs_tls() -> None:
    """Said at once, not at the first call."""
    assert channel_credentials(False, None) is None
    with pytest.raises(ValueError, match="tls"):
        Client("127.0.0.1:1", client_certificate=("a.pem", "a.key"))


async def test_the_example_runs() -> None:
    """examples/service.py asks, streams, and says which limit is reached."""
    gateway = ScriptedGateway()
    async with serving(gateway) as target:

        async def run() -> tuple[str, str, int | None]:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                EXAMPLE,
                target,
                "text",
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            said, complained = await process.communicate()
            return said.decode(), complained.decode(), process.returncode

        said, _, code = await run()
        assert (said.splitlines()[0], code) == ("The capital is Paris.", 0)
        gateway.error = errors.ResourceExhausted("x", reason="QUOTA_EXCEEDED", quota="tokens_per_day=5")
        _, complained, code = await run()
        assert (complained, code) == ("over the limit tokens_per_day=5; again in None s\n", 1)
