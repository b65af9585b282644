"""The stream of the draft history in a real Redis server: limits, losses and foreign writers."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from service.cluster.settings import ClusterSettings
from service.draft_history.entries import MAX_ENTRY_BYTES
from service.draft_history.settings import DraftHistorySettings
from service.draft_history.stream import (
    CHECKS_PER_STREAM,
    ENTRIES_PER_CALL,
    MIN_ENTRY_BYTES,
    Cursor,
    HistoryPart,
    HistoryUnavailable,
    RedisHistoryStream,
)
from tests.redis_server import RedisServer, redis_server
from tests.service.cluster.test_redis import ACL

LABEL = "ab" * 16
KEY = "{coppice}:draft-history:" + LABEL
OWN, OTHER = "a" * 12, "b" * 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("history")) as started:
        yield started


@pytest.fixture
def redis(server: RedisServer) -> Iterator[Redis]:
    server.flush()
    with Redis(port=server.port) as client:
        yield client


def stream(
    server: RedisServer,
    replica: str = OTHER,
    label: str = LABEL,
    call_seconds: float = 5.0,
    **settings: Any,
) -> RedisHistoryStream:
    cluster = ClusterSettings(redis_url=server.url, call_seconds=call_seconds)
    chosen = DraftHistorySettings(enabled=True, **settings)
    return RedisHistoryStream(cluster, chosen, replica=replica, label=label)


@pytest.fixture
async def own(server: RedisServer, redis: Redis) -> AsyncIterator[RedisHistoryStream]:
    opened = stream(server, OWN)
    yield opened
    await opened.close()


@pytest.fixture
async def other(server: RedisServer, redis: Redis) -> AsyncIterator[RedisHistoryStream]:
    opened = stream(server)
    yield opened
    await opened.close()


def num_bytes(redis: Redis) -> int:
    used = redis.memory_usage(KEY, samples=0)
    assert used is not None
    return used


async def read_all(
    one: RedisHistoryStream, cursor: Cursor | None = None
) -> tuple[list[bytes], HistoryPart]:
    part = await one.read(cursor or Cursor())
    entries = list(part.entries)
    while not part.is_last:
        part = await one.read(part.cursor)
        entries += part.entries
    return entries, part


async def test_entries_of_others_are_read_once_and_in_order(
    own: RedisHistoryStream, other: RedisHistoryStream
) -> None:
    written = [b"%d" % number for number in range(3 * ENTRIES_PER_CALL)]
    for data in written:
        await other.append(data)
    entries, part = await read_all(own)
    assert entries == written and part.num_missed == part.num_refused == 0
    await other.append(b"more")
    assert (await read_all(own, part.cursor))[0] == [b"more"]


async def test_own_entries_are_not_returned(
    own: RedisHistoryStream, other: RedisHistoryStream
) -> None:
    await own.append(b"own")
    await other.append(b"other")
    assert (await read_all(own))[0] == [b"other"]
    assert (await read_all(other))[0] == [b"own"]


async def test_stores_with_another_label_have_another_stream(
    server: RedisServer, own: RedisHistoryStream
) -> None:
    foreign = stream(server, label="cd" * 16)
    await foreign.append(b"another model")
    await foreign.close()
    assert (await read_all(own))[0] == []


async def test_stream_is_bounded_in_bytes_and_lost_entries_are_counted(
    server: RedisServer, own: RedisHistoryStream, redis: Redis
) -> None:
    small = stream(server, stream_bytes=16 * MAX_ENTRY_BYTES)
    await small.append(b"0")
    _, part = await read_all(own)
    for number in range(1, 41):
        await small.append((b"%02d" % number) * (MAX_ENTRY_BYTES // 2))
        assert num_bytes(redis) <= 16 * MAX_ENTRY_BYTES
    await small.close()
    kept = int(redis.xlen(KEY))
    assert kept > 10
    lost = await own.read(part.cursor)
    assert lost.num_missed == 40 - kept
    entries, _ = await read_all(own, part.cursor)
    assert [data[:2] for data in entries] == [b"%02d" % number for number in range(41 - kept, 41)]


async def test_size_is_kept_between_two_checks(server: RedisServer, redis: Redis) -> None:
    max_bytes = 4 * CHECKS_PER_STREAM * MAX_ENTRY_BYTES
    large = stream(server, stream_bytes=max_bytes)
    sizes = []
    for _ in range(100):
        await large.append(b"x" * MAX_ENTRY_BYTES)
        sizes.append(num_bytes(redis))
    await large.close()
    assert max_bytes * 3 // 4 < max(sizes) <= max_bytes


async def test_number_of_small_entries_is_bounded(server: RedisServer, redis: Redis) -> None:
    small = stream(server, stream_bytes=16 * MAX_ENTRY_BYTES)
    for _ in range(600):
        await small.append(b"x")
    await small.close()
    assert redis.xlen(KEY) == 16 * MAX_ENTRY_BYTES // MIN_ENTRY_BYTES


async def test_entries_that_are_larger_than_the_stream_are_dropped(
    server: RedisServer, redis: Redis, own: RedisHistoryStream
) -> None:
    for _ in range(4):
        redis.xadd(KEY, {"replica": OTHER, "texts": b"x" * 2**21})
    small = stream(server, stream_bytes=16 * MAX_ENTRY_BYTES)
    await small.append(b"valid")
    await small.close()
    assert redis.xlen(KEY) == 1 and (await read_all(own))[0] == [b"valid"]


async def test_old_entries_are_dropped(
    redis: Redis, own: RedisHistoryStream, other: RedisHistoryStream
) -> None:
    redis.xadd(KEY, {"replica": OTHER, "texts": b"old"}, id="1-1")
    await other.append(b"new")
    assert redis.xlen(KEY) == 1 and (await read_all(own))[0] == [b"new"]


async def test_old_entries_are_not_returned(
    server: RedisServer, redis: Redis, own: RedisHistoryStream
) -> None:
    redis.xadd(KEY, {"replica": OTHER, "texts": b"old"}, id="1-1")
    entries, part = await read_all(own)
    assert entries == [] and part.num_refused == 0


async def test_stream_of_replicas_that_are_gone_expires(server: RedisServer, redis: Redis) -> None:
    brief = stream(server, max_age_seconds=0.2)
    await brief.append(b"last")
    await brief.close()
    async with asyncio.timeout(10):
        while redis.exists(KEY):
            await asyncio.sleep(0.01)


async def test_new_stream_is_read_from_its_start(
    server: RedisServer, own: RedisHistoryStream, other: RedisHistoryStream
) -> None:
    for _ in range(3):
        await other.append(b"before")
    _, part = await read_all(own)
    server.flush()
    await other.append(b"after")
    restarted = await own.read(part.cursor)
    assert restarted.entries == () and not restarted.is_last
    assert (await read_all(own, restarted.cursor))[0] == [b"after"]


async def test_new_stream_on_a_clock_that_is_behind_is_read_from_its_start(
    server: RedisServer, own: RedisHistoryStream, other: RedisHistoryStream
) -> None:
    await other.append(b"entry")
    ahead = Cursor(id=(2**50, 0), number=1)
    restarted = await own.read(ahead)
    assert (await read_all(own, restarted.cursor))[0] == [b"entry"]


async def test_entries_before_the_saved_store_are_neither_read_nor_missed(
    redis: Redis, own: RedisHistoryStream
) -> None:
    """The stream has entries on both sides of the time at which the store was saved."""
    now = int(time.time() * 1000)
    for number in range(2 * ENTRIES_PER_CALL):
        redis.xadd(KEY, {"replica": OTHER, "texts": b"%d" % number}, id=f"{now + number}-0")
    entries, part = await read_all(own, Cursor(id=(now + 4, 0)))
    assert entries == [b"%d" % number for number in range(5, 2 * ENTRIES_PER_CALL)]
    redis.xtrim(KEY, maxlen=1, approximate=False)
    assert (await own.read(part.cursor)).num_missed == 0


async def test_store_that_is_newer_than_the_stream_reads_only_what_follows(
    own: RedisHistoryStream, other: RedisHistoryStream
) -> None:
    """The clock of the replica may be ahead of that of Redis."""
    await other.append(b"in the store")
    entries, part = await read_all(own, Cursor(id=(2**50, 0)))
    await other.append(b"new")
    assert entries == [] and (await read_all(own, part.cursor))[0] == [b"new"]


@pytest.mark.parametrize(
    "fields",
    [
        {"texts": b"x"},
        {"texts": b"x", "replica": OTHER},
        {"replica": OTHER, "texts": b"x", "more": b"x"},
        {"replica": OTHER, "texts": b"x" * (MAX_ENTRY_BYTES + 1)},
        {"": ""},
    ],
)
async def test_foreign_entries_are_refused_without_being_transferred(
    redis: Redis, own: RedisHistoryStream, other: RedisHistoryStream, fields: Any
) -> None:
    redis.xadd(KEY, fields)
    await other.append(b"valid")
    entries, part = await read_all(own)
    assert entries == [b"valid"] and part.num_refused == 1


async def test_key_of_another_type_is_unavailable(redis: Redis, own: RedisHistoryStream) -> None:
    redis.set(KEY, "not a stream")
    for call in (own.append(b"x"), own.read(Cursor())):
        with pytest.raises(HistoryUnavailable):
            await call


async def test_stream_with_exhausted_ids_is_read_again_once_it_was_deleted(
    redis: Redis, own: RedisHistoryStream, other: RedisHistoryStream
) -> None:
    last = f"{2**64 - 1}-{2**64 - 1}"
    redis.xadd(KEY, {"replica": "c" * 12, "texts": b"x"}, id=last)
    entries, part = await read_all(own, Cursor(id=(1, 0)))
    assert entries == [b"x"]
    assert (await own.read(part.cursor)).is_last
    with pytest.raises(HistoryUnavailable):
        await other.append(b"more")
    redis.delete(KEY)
    await other.append(b"more")
    restarted = await own.read(part.cursor)
    assert (await read_all(own, restarted.cursor))[0] == [b"more"]


async def test_server_without_an_answer_is_unavailable(
    server: RedisServer, own: RedisHistoryStream
) -> None:
    await own.append(b"x")
    hasty = stream(server, call_seconds=0.2)
    server.pause()
    try:
        with pytest.raises(HistoryUnavailable):
            await hasty.read(Cursor())
    finally:
        server.resume()
        await hasty.close()
    assert (await own.read(Cursor())).is_last


async def test_rights_of_the_documented_redis_user_are_sufficient(tmp_path: Path) -> None:
    with redis_server(tmp_path, ACL) as server:
        cluster = ClusterSettings(
            redis_url=server.url, redis_user="coppice", redis_password="s3cret", call_seconds=5.0
        )
        settings = DraftHistorySettings(enabled=True)
        writer, reader = (
            RedisHistoryStream(cluster, settings, replica=replica, label=LABEL)
            for replica in (OTHER, OWN)
        )
        await writer.append(b"entry")
        assert (await read_all(reader))[0] == [b"entry"]
        for each in (writer, reader):
            await each.close()
