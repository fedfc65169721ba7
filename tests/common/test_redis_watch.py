"""A process is let in by its Redis, waits for it, or says in one line why it never will be."""

from __future__ import annotations

import asyncio
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest
import structlog

from services.common.redis_watch import RedisWatch, Refused, ask
from services.common.serve import StartError
from services.common.settings import SettingsError, load
from services.common.shared import RedisSettings, SharedStateLost
from tests.redis_server import RedisServer

PASSWORD = "right-and-secret"


@pytest.fixture(scope="module")
def locked() -> Iterator[RedisServer]:
    """A Redis that wants a password, and has a user with hardly any rights."""
    server = RedisServer(PASSWORD)
    server.client.acl_setuser("scripter", enabled=True, passwords=["+s"], commands=["+eval"], keys=["headrace:*"])
    server.client.acl_setuser("reader", enabled=True, passwords=["+r"], commands=["+get"], keys=["headrace:*"])
    yield server
    server.close()


async def refusal(url: str) -> str:
    with pytest.raises(Refused) as caught:
        await ask(url)
    said = str(caught.value)
    assert said.startswith("HEADRACE_REDIS_URL: ")
    assert "\n" not in said
    assert PASSWORD not in said
    assert "wrong-and-secret" not in said
    return said


async def test_who_is_not_let_in(locked: RedisServer, redis_server: RedisServer) -> None:
    """Wrong password, none, another user, missing rights, a database that is not there: each has its own line."""
    where = f"127.0.0.1:{locked.port}"
    wrong = await refusal(f"redis://:wrong-and-secret@{where}/0")
    assert f"Redis at {where} does not take the password" in wrong
    assert "wants a password, and the URL has none" in await refusal(f"redis://{where}/0")
    assert "does not take the password" in await refusal(f"redis://nobody:{PASSWORD}@{where}/0")
    for user in ("reader:r", "scripter:s"):
        assert "refuses" in await refusal(f"redis://{user}@{where}/0")
    assert "DB index is out of range" in await refusal(redis_server.url.replace("/0", "/99"))
    await ask(locked.url)
    await ask(redis_server.url)


@contextmanager
def web_server() -> Iterator[int]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[method-assign]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@contextmanager
def grpc_server() -> Iterator[int]:
    server = grpc.server(None)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0).wait()


@pytest.mark.parametrize("other", [web_server, grpc_server])
async def test_something_that_is_no_redis(other) -> None:
    """Another kind of server is not waited for, and what it says is shown."""
    with other() as port:
        assert f"what answers at 127.0.0.1:{port} is no Redis: b'" in await refusal(
            f"redis://:{PASSWORD}@127.0.0.1:{port}/0"
        )


async def test_the_process_ends_at_once(locked: RedisServer) -> None:
    """A refusal is a StartError, before anything else is waited for; without a URL nothing is asked."""
    with pytest.raises(StartError, match="does not take the password"):
        await RedisWatch(f"redis://:wrong-and-secret@127.0.0.1:{locked.port}/0", structlog.get_logger()).begin()
    await RedisWatch("", structlog.get_logger()).begin()


async def test_one_that_is_away_is_waited_for(own_redis_server: RedisServer) -> None:
    """The start goes on, one line says what is waited for and why, another that it answers."""
    own_redis_server.stop()
    with pytest.raises(SharedStateLost, match="Connect call failed"):
        await ask(own_redis_server.url)
    answered = asyncio.Event()
    lines = []

    def heard(_logger, method: str, fields: dict) -> str:
        lines.append({**fields, "level": method})
        if fields["event"] == "redis answers":
            answered.set()
        raise structlog.DropEvent

    log = structlog.wrap_logger(structlog.PrintLogger(), processors=[heard])
    watch = RedisWatch(own_redis_server.url, log)
    await watch.begin()
    await asyncio.to_thread(own_redis_server.start)
    await asyncio.wait_for(answered.wait(), 10)
    await watch.close()
    assert [line["event"] for line in lines] == ["waiting", "redis answers"]
    assert lines[0]["level"] == "warning"
    assert lines[0]["address"] == f"127.0.0.1:{own_redis_server.port}"
    assert "Connect call failed" in lines[0]["reason"]


async def test_a_trouble_that_passes(own_redis_server: RedisServer) -> None:
    """A Redis that answers with an error which will pass is waited for, not given up."""
    own_redis_server.client.config_set("replica-serve-stale-data", "no")
    own_redis_server.client.replicaof("127.0.0.1", 1)
    with pytest.raises(SharedStateLost, match="MASTER"):
        await ask(own_redis_server.url)


@pytest.mark.parametrize("url", ["http://x", "redis://:secret@h:port/0", "redis://:secret@h/zero", "nonsense"])
def test_a_url_that_is_none(url: str) -> None:
    """Refused with the others of the settings, without the password."""
    with pytest.raises(SettingsError) as caught:
        load(RedisSettings, {"HEADRACE_REDIS_URL": url}, "redis")
    assert caught.value.problems == ["HEADRACE_REDIS_URL: expected redis://[[user]:password@]host[:port][/database]"]
