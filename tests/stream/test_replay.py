"""The replay log keeps every entry in order for one owner at a time, in memory and in a real Redis alike."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from services.common.shared import SharedStateLost
from services.stream import replay
from services.stream.redis_log import RedisLog
from services.stream.replay import LogFull, MemoryLog, Superseded


@pytest.fixture(params=["memory", "redis"])
async def log(request):
    made = MemoryLog(60) if request.param == "memory" else RedisLog(request.getfixturevalue("redis_server").url, 60)
    yield made
    await made.close()


@pytest.fixture
def stream_id():
    return uuid.uuid4().hex


async def test_entries_come_back_in_order(log, stream_id):
    """Opening, tenant and entries, byte for byte."""
    epoch = await log.create(stream_id, "t", b"opening\x00\xff")
    entries = [bytes([number, 0, 255]) for number in range(20)]
    for number, entry in enumerate(entries):
        await log.append(stream_id, epoch, number, entry)
    record = await log.take_over(stream_id, "t")
    assert (record.opening, record.tenant, record.entries) == (b"opening\x00\xff", "t", entries)


async def test_taking_over_fences_the_earlier_owner(log, stream_id):
    """An append with an older epoch fails; the new owner goes on with the next number."""
    old = await log.create(stream_id, "t", b"o")
    await log.append(stream_id, old, 0, b"a")
    assert await log.owns(stream_id, old)
    new = (await log.take_over(stream_id, "t")).epoch
    assert not await log.owns(stream_id, old)
    assert await log.owns(stream_id, new)
    assert not await log.owns("unknown", new)
    with pytest.raises(Superseded):
        await log.append(stream_id, old, 1, b"b")
    await log.append(stream_id, new, 1, b"c")
    assert (await log.take_over(stream_id, "t")).entries == [b"a", b"c"]


async def test_of_many_that_take_over_one_owns(log, stream_id):
    """Twenty at once: each has its own epoch, and only the last may append."""
    await log.create(stream_id, "t", b"o")
    records = await asyncio.gather(*(log.take_over(stream_id, "t") for _ in range(20)))
    epochs = [record.epoch for record in records]
    assert sorted(set(epochs)) == sorted(epochs)
    results = await asyncio.gather(*(log.append(stream_id, e, 0, b"x") for e in epochs), return_exceptions=True)
    assert [isinstance(r, Superseded) for r in results].count(False) == 1
    assert results[epochs.index(max(epochs))] is None


async def test_a_gap_is_refused(log, stream_id):
    """Entries are numbered without a gap."""
    epoch = await log.create(stream_id, "t", b"o")
    with pytest.raises(Superseded):
        await log.append(stream_id, epoch, 1, b"b")


async def test_unknown_and_foreign_streams_look_alike(log, stream_id):
    """None for both."""
    await log.create(stream_id, "t", b"o")
    assert await log.take_over("unknown", "t") is None
    assert await log.take_over(stream_id, "other") is None
    assert await log.take_over(stream_id, "t") is not None


async def test_a_stream_is_bounded(log, stream_id, monkeypatch):
    """More than the bound is refused, and what was there stays."""
    monkeypatch.setattr(replay, "MAX_STREAM_BYTES", 10)
    monkeypatch.setattr("services.stream.redis_log.MAX_STREAM_BYTES", 10)
    epoch = await log.create(stream_id, "t", b"o")
    await log.append(stream_id, epoch, 0, b"12345678")
    with pytest.raises(LogFull):
        await log.append(stream_id, epoch, 1, b"9012")
    assert (await log.take_over(stream_id, "t")).entries == [b"12345678"]


async def test_memory_forgets_after_its_time_and_in_bounds(monkeypatch):
    """The oldest goes first, by time and by bytes; sizes add up."""
    monkeypatch.setattr(replay, "MAX_LOG_BYTES", 100)
    now = [0.0]
    log = MemoryLog(10, clock=lambda: now[0])
    for name in ("a", "b"):
        await log.append(name, await log.create(name, "t", b"x" * 10), 0, b"y" * 30)
    assert log.size_bytes == 80
    await log.create("c", "t", b"x" * 30)
    assert await log.take_over("a", "t") is None
    assert await log.take_over("b", "t") is not None
    now[0] = 11
    assert await log.take_over("b", "t") is None
    with pytest.raises(Superseded):
        await log.append("b", 2, 1, b"z")
    await log.create("d", "t", b"")
    assert log.size_bytes == 0


async def test_redis_keys_always_expire(redis_server, stream_id):
    """Every key of a stream has a time to live, from its first moment."""
    log = RedisLog(redis_server.url, 60)
    epoch = await log.create(stream_id, "t", b"o")
    for number in range(3):
        await log.append(stream_id, epoch, number, b"x")
    ttls = [redis_server.client.ttl(key) for key in redis_server.client.keys(f"*{stream_id}*")]
    await log.close()
    assert len(ttls) == 2
    assert all(0 < ttl <= 60 for ttl in ttls)


async def test_redis_takes_the_same_entry_twice_as_once(redis_server, stream_id):
    """A retried append, whose answer was lost, does no harm."""
    log = RedisLog(redis_server.url, 60)
    epoch = await log.create(stream_id, "t", b"o")
    await log.append(stream_id, epoch, 0, b"x")
    await log.append(stream_id, epoch, 0, b"x")
    with pytest.raises(Superseded):
        await log.append(stream_id, epoch, 0, b"other")
    record = await log.take_over(stream_id, "t")
    await log.close()
    assert record.entries == [b"x"]


async def test_redis_scripts_survive_a_flush_and_a_restart(own_redis_server, stream_id):
    """SCRIPT FLUSH and a restarted server are no errors."""
    log = RedisLog(own_redis_server.url, 60)
    epoch = await log.create(stream_id, "t", b"o")
    own_redis_server.client.script_flush()
    await log.append(stream_id, epoch, 0, b"x")
    own_redis_server.stop()
    with pytest.raises(SharedStateLost):
        await log.append(stream_id, epoch, 1, b"y")
    own_redis_server.start()
    with pytest.raises(Superseded):
        await log.append(stream_id, epoch, 1, b"y")
    assert await log.create(stream_id, "t", b"o") == 1
    await log.close()


async def test_cancelled_callers_do_not_mix_up_answers(redis_server):
    """Calls cancelled at random leave every other call its own answer."""
    log = RedisLog(redis_server.url, 60)
    ids = [uuid.uuid4().hex for _ in range(100)]
    for name in ids:
        await log.create(name, "t", name.encode())
    tasks = [asyncio.create_task(log.take_over(name, "t")) for name in ids]
    for number, task in enumerate(tasks):
        if number % 3 == 0:
            await asyncio.sleep(0)
            task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    answers = [(name, r) for name, r in zip(ids, results, strict=True) if not isinstance(r, BaseException)]
    await log.close()
    assert answers
    assert all(record.opening == name.encode() for name, record in answers)
