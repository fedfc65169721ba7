"""Whether Redis lets this process in: asked once at its start, then until it answers. Knows no service.

What waiting does not mend ends the process at its start: a wrong password, none where one is wanted, a database that is
not there, rights that are missing, something that is no Redis. One that cannot be reached ends nothing: the process
works without it as the policies say, and the log says what it waits for.
"""

from __future__ import annotations

import asyncio

from redis.asyncio.connection import parse_url
from redis.exceptions import AuthenticationError, InvalidResponse, RedisError, ResponseError

from services.common.logs import Log
from services.common.serve import StartError
from services.common.shared import SharedStateLost, connect

TIMEOUT_S = 1.0
RETRY_S = 1.0
_PROBE = "return redis.call('EXISTS', KEYS[1])"  # as everything that is asked later: a script on a key of ours
_PROBE_KEY = "headrace:probe"
# Other errors of Redis pass: a replica without its master, a script of somebody else that runs too long.
_FOR_GOOD = ("DB index is out of range", "nknown command", "has no permissions", "user executing the script")


class Refused(Exception):
    """What answers at the address does not let this process in; the message is one line without the password."""


class RedisWatch:
    """Waits for Redis beside the work of its process.

    Args:
        url: of Redis; empty: there is nothing to watch.
        log: told when it does not answer, and when it does.
    """

    def __init__(self, url: str, log: Log) -> None:
        self._url, self._log = url, log
        self._waiting: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Asks once. Raises StartError where this process is not let in."""
        if not self._url:
            return
        try:
            await ask(self._url)
        except Refused as error:
            raise StartError(str(error)) from error
        except SharedStateLost as error:
            self._report(error)
            self._waiting = asyncio.create_task(self._wait(str(error)))

    async def _wait(self, trouble: str) -> None:
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                await ask(self._url)
            except (Refused, SharedStateLost) as error:
                if str(error) != trouble:
                    self._report(error)
                trouble = str(error)
            else:
                self._log.info("redis answers", address=address_of(self._url))
                return

    def _report(self, error: Refused | SharedStateLost) -> None:
        self._log.warning("waiting", peer="redis", address=address_of(self._url), reason=str(error))

    async def close(self) -> None:
        """Waits no more."""
        if self._waiting is not None:
            self._waiting.cancel()
            await asyncio.gather(self._waiting, return_exceptions=True)


async def ask(url: str, timeout_s: float = TIMEOUT_S) -> None:
    """Returns where Redis does what is asked.

    Raises:
        Refused: it answers, and will not.
        SharedStateLost: it does not answer; the message is why.
    """
    client = connect(url, timeout_s, retries=0, connections=1)
    who = f"HEADRACE_REDIS_URL: Redis at {address_of(url)}"
    try:
        await client.eval(_PROBE, 1, _PROBE_KEY)
    except AuthenticationError as error:
        if not parse_url(url).get("password"):
            raise Refused(f"{who} wants a password, and the URL has none") from error
        raise Refused(f"{who} does not take the password ({error})") from error
    except ResponseError as error:
        if any(words in str(error) for words in _FOR_GOOD):
            raise Refused(f"{who} refuses: {error}") from error
        raise SharedStateLost(str(error)) from error
    except (RedisError, OSError, TimeoutError) as error:
        answer = await _first_words(url, timeout_s)
        if isinstance(error, InvalidResponse) or answer:
            raise Refused(f"HEADRACE_REDIS_URL: what answers at {address_of(url)} is no Redis: {answer!r}") from error
        raise SharedStateLost(str(error) or type(error).__name__) from error
    finally:
        await client.aclose(close_connection_pool=True)


def address_of(url: str) -> str:
    """host:port, or the path of the socket; never the password."""
    parts = parse_url(url)
    return str(parts.get("path") or f"{parts.get('host', 'localhost')}:{parts.get('port', 6379)}")


async def _first_words(url: str, timeout_s: float) -> bytes:
    """What a server that is no Redis says to a PING in plain text; empty where Redis or nobody is there."""
    parts = parse_url(url)
    if "path" in parts or url.startswith("rediss:"):
        return b""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(parts.get("host", "localhost"), parts.get("port", 6379))
            try:
                writer.write(b"PING\r\n")
                answer = await reader.read(40)
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return b""
    return b"" if answer.startswith((b"+", b"-")) else answer
