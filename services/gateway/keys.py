"""Where keys come from: a file, or a hash in Redis. Either is read again as it changes. Knows no gRPC.

[[keys]]
sha256 = "..."                 # of the key; `printf %s "$KEY" | sha256sum`
tenant = "acme"
models = ["smollm2-135m-instruct"]
priority = "standard"          # the most urgent that it may ask for
requests_per_minute = 60
"""

from __future__ import annotations

import asyncio
import json
import tomllib
from pathlib import Path
from typing import Any, Protocol

from services.common.logs import Log
from services.common.shared import SharedStateLost, connect, reached
from services.gateway.identity import Access, BadKeys, Identity, Table, read_entry

REDIS_KEY = "headrace:keys"  # a hash: SHA-256 of a key in hex → the other fields of an entry, JSON
RELOAD_EVERY_S = 1.0
REDIS_TIMEOUT_S = 0.5


class KeySource(Protocol):
    """Reads all keys. Not thread-safe."""

    async def read(self) -> Table | None:
        """Every key; None where nothing has changed since the last time.

        Raises:
            BadKeys: an entry is wrong, or there is nothing to read.
            SharedStateLost: Redis does not answer.
        """

    async def close(self) -> None:
        """Closes connections."""


class KeyFile:
    """Keys in a TOML or JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None

    async def read(self) -> Table | None:
        """Every key, if the file is another than last time."""
        try:
            stat = self._path.stat()
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen == self._seen:
                return None
            text = self._path.read_text(encoding="utf-8")
            entries = (json.loads if self._path.suffix == ".json" else tomllib.loads)(text).get("keys", [])
        except (OSError, UnicodeDecodeError) as error:
            raise BadKeys(f"{self._path}: cannot be read ({type(error).__name__})") from error
        except (ValueError, AttributeError):
            raise BadKeys(f"{self._path}: is not TOML or JSON with a list named keys") from None
        table = _table([(entry, f"{self._path}: keys[{number}]") for number, entry in enumerate(entries)])
        self._seen = seen
        return table

    async def close(self) -> None:
        """Nothing to close."""


class RedisKeys:
    """Keys in Redis: `HSET headrace:keys <sha256> '{"tenant": "acme"}'`; `HDEL` revokes."""

    def __init__(self, url: str) -> None:
        self._redis = connect(url, REDIS_TIMEOUT_S)
        self._seen: dict[bytes, bytes] | None = None

    async def read(self) -> Table | None:
        """Every key, if any has changed."""
        got: dict[bytes, bytes] = await reached(self._redis.hgetall(REDIS_KEY))
        if got == self._seen:
            return None
        entries: list[tuple[Any, str]] = []
        for number, (digest, raw) in enumerate(sorted(got.items())):
            where = f"{REDIS_KEY}, entry {number}"
            try:
                entries.append(({**json.loads(raw), "sha256": digest.decode("ascii")}, where))
            except (ValueError, TypeError):
                raise BadKeys(f"{where}: is not a JSON object under a SHA-256") from None
        table = _table(entries)
        self._seen = got
        return table

    async def close(self) -> None:
        """Closes the connections."""
        await self._redis.aclose(close_connection_pool=True)


def _table(entries: list[tuple[Any, str]]) -> Table:
    table: dict[str, Identity] = {}
    for entry, where in entries:
        if not isinstance(entry, dict):
            raise BadKeys(f"{where}: is not a table of fields")
        identity = read_entry(entry, where)
        if identity.key_id in table:
            raise BadKeys(f"{where}: the same key is given twice")
        table[identity.key_id] = identity
    return table


class KeyRing:
    """Keeps `access.table` up to date; what cannot be read leaves the last good table in force."""

    def __init__(self, source: KeySource, access: Access, log: Log) -> None:
        self._source, self._access, self._log = source, access, log
        self._trouble = ""

    async def load(self) -> None:
        """Reads once. Raises like `KeySource.read`."""
        table = await self._source.read()
        if table is not None:
            self._access.table = table
            self._log.info("keys", count=len(table))

    async def watch(self) -> None:
        """Reads again and again, for ever; each new trouble is one line in the log."""
        while True:
            await asyncio.sleep(RELOAD_EVERY_S)
            trouble = ""
            try:
                await self.load()
            except (BadKeys, SharedStateLost) as error:
                trouble = str(error)
            if trouble and trouble != self._trouble:
                self._log.warning("keys not read; the last ones stay in force", reason=trouble)
            self._trouble = trouble

    async def close(self) -> None:
        """Closes the source."""
        await self._source.close()
