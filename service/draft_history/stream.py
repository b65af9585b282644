"""Stream of a cluster's draft history in Redis 7.0 or later, one Lua script per call.

A stream belongs to one label of draft stores, so replicas of another model or vocabulary have
another stream. Redis drops the oldest entries beyond the maximum size, entries older than the
maximum age, and the whole stream when nobody has written to it for that time. Sizes of entries are
checked in Redis, so that a replica never receives one that is too large.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.exceptions import RedisError

from service.cluster.redis_registry import connection_pool
from service.cluster.settings import ClusterSettings
from service.draft_history.entries import MAX_ENTRY_BYTES
from service.draft_history.settings import DraftHistorySettings

ENTRIES_PER_CALL = 8
MIN_ENTRY_BYTES = 4096
"""Size in Redis that each entry counts as at least, which bounds the number of entries."""
CHECKS_PER_STREAM = 16
"""Number of checks of the stream's size while it is filled, because a check visits all entries.

A check leaves seven eighths of the maximum, so that all entries until the next one have room.
"""
MAX_CONNECTIONS = 2
EntryId = tuple[int, int]
"""Id of a stream entry: milliseconds and sequence number."""


class HistoryUnavailable(Exception):
    """Redis did not respond in time, or refused the call; the message is that of the client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Position in a stream: the id of the last entry read, and its number if it is known.

    Entries are numbered from 1 in the order in which they were written. The number at a given id is
    known once the end of the stream was reached.
    """

    id: EntryId = (0, 0)
    number: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPart:
    """Next entries of other replicas, in the order of the stream, and the position after them.

    `num_read` entries of the stream were read, including the replica's own ones. `num_missed` more
    were dropped by Redis before, `num_refused` are too large or have other fields. `is_last`: the
    stream has no further entries.
    """

    entries: Sequence[bytes]
    cursor: Cursor
    num_read: int
    num_missed: int
    num_refused: int
    is_last: bool


class HistoryStream(Protocol):
    """Interface of the stream. Both methods raise HistoryUnavailable."""

    async def append(self, data: bytes) -> None: ...

    async def read(self, cursor: Cursor) -> HistoryPart: ...

    async def close(self) -> None: ...


class RedisHistoryStream:
    """`HistoryStream` in Redis, with connections of its own. Connects on the first call."""

    def __init__(
        self, cluster: ClusterSettings, settings: DraftHistorySettings, *, replica: str, label: str
    ) -> None:
        assert cluster.redis_url is not None, "redis_url is required"
        self._timeout_seconds = cluster.call_seconds
        self._key = "{" + cluster.key_prefix + "}:draft-history:" + label
        self._replica = replica
        self._max_bytes = settings.stream_bytes
        self._check_interval = settings.stream_bytes // (CHECKS_PER_STREAM * MAX_ENTRY_BYTES)
        self._max_age = math.ceil(settings.max_age_seconds * 1000)
        pool = connection_pool(cluster.redis_url, cluster, max_connections=MAX_CONNECTIONS)
        self._redis = Redis(connection_pool=pool)
        self._append_script = self._redis.register_script(APPEND_SCRIPT)
        self._read_script = self._redis.register_script(READ_SCRIPT)

    async def append(self, data: bytes) -> None:
        size = (self._max_bytes // MIN_ENTRY_BYTES, self._max_bytes * 7 // 8, self._check_interval)
        await self._call(self._append_script, self._replica, data, *size, self._max_age)

    async def read(self, cursor: Cursor) -> HistoryPart:
        last_id = "-".join(map(str, cursor.id))
        arguments = (last_id, self._replica, self._max_age, ENTRIES_PER_CALL, MAX_ENTRY_BYTES)
        return _parse(await self._call(self._read_script, *arguments), cursor)

    async def close(self) -> None:
        async with self._translate_errors():
            await self._redis.aclose(close_connection_pool=True)

    async def _call(self, script: Any, *arguments: str | bytes | int) -> Any:
        async with self._translate_errors():
            return await script(keys=[self._key], args=arguments)

    @asynccontextmanager
    async def _translate_errors(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                yield
        except (RedisError, OSError, TimeoutError) as error:
            raise HistoryUnavailable(f"{type(error).__name__}: {error}") from error


def _parse(answer: Any, before: Cursor) -> HistoryPart:
    num_added, length, last_id, found = answer
    last = _entry_id(last_id)
    if before.number is not None and (last < before.id or num_added < before.number):
        # The stream was deleted and written again, on a clock that may be behind.
        return _part_without_entries(Cursor(), is_last=last == (0, 0))
    if last < before.id:
        return _part_without_entries(Cursor(id=last, number=num_added), is_last=True)
    is_last = len(found) < ENTRIES_PER_CALL
    number, num_missed = _number_before(before, num_added - length)
    return HistoryPart(
        entries=[data for _, kind, data in found if kind == b"entry"],
        cursor=Cursor(
            id=_entry_id(found[-1][0]) if found else before.id,
            number=num_added if is_last else None if number is None else number + len(found),
        ),
        num_read=len(found),
        num_missed=num_missed,
        num_refused=sum(kind == b"refused" for _, kind, _ in found),
        is_last=is_last,
    )


def _number_before(cursor: Cursor, num_dropped: int) -> tuple[int | None, int]:
    """Number of the entry before the next one to read, and of the entries missed before that."""
    if cursor.number is None:
        return (num_dropped if cursor == Cursor() else None), 0
    number = max(cursor.number, num_dropped)
    return number, number - cursor.number


def _part_without_entries(cursor: Cursor, *, is_last: bool) -> HistoryPart:
    return HistoryPart(
        entries=(), cursor=cursor, num_read=0, num_missed=0, num_refused=0, is_last=is_last
    )


def _entry_id(text: bytes) -> EntryId:
    milliseconds, number = text.split(b"-")
    return int(milliseconds), int(number)


# Lua scripts. The Redis server's clock decides which entries are too old.

APPEND_SCRIPT = """
-- KEYS: stream; ARGV: replica id, entry, maximum number of entries, size in bytes after a check,
-- number of entries between two checks, maximum age in milliseconds
redis.call('XADD', KEYS[1], 'MAXLEN', ARGV[3], '*', 'replica', ARGV[1], 'texts', ARGV[2])
local time = redis.call('TIME')
local oldest = time[1] * 1000 + math.floor(time[2] / 1000) - ARGV[6]
redis.call('XTRIM', KEYS[1], 'MINID', string.format('%d', math.max(oldest, 0)))
redis.call('PEXPIRE', KEYS[1], ARGV[6])
local info = redis.call('XINFO', 'STREAM', KEYS[1])
local known = {}
for i = 1, #info, 2 do known[info[i]] = info[i + 1] end
if known['entries-added'] % ARGV[5] > 0 then return end
local length = known['length']
local excess = redis.call('MEMORY', 'USAGE', KEYS[1], 'SAMPLES', '0') / ARGV[4]
while length > 1 and excess > 1 do
  length = math.max(1, math.floor(length / excess))
  redis.call('XTRIM', KEYS[1], 'MAXLEN', length)
  excess = redis.call('MEMORY', 'USAGE', KEYS[1], 'SAMPLES', '0') / ARGV[4]
end
"""

READ_SCRIPT = """
-- KEYS: stream; ARGV: last id, own replica id, maximum age in milliseconds, number of entries,
-- maximum size of an entry
-- Returns: number of entries ever added, number in the stream, last id; for each of the next
-- entries its id, its kind, and its bytes if the kind is `entry`
if redis.call('EXISTS', KEYS[1]) == 0 then return {0, 0, '0-0', {}} end
local info = redis.call('XINFO', 'STREAM', KEYS[1])
local known = {}
for i = 1, #info, 2 do known[info[i]] = info[i + 1] end
local time = redis.call('TIME')
local oldest = time[1] * 1000 + math.floor(time[2] / 1000) - ARGV[3]
local found = {}
-- An error if nothing can follow the last id, as it is the largest one; then the range is empty.
local range = redis.pcall('XRANGE', KEYS[1], '(' .. ARGV[1], '+', 'COUNT', ARGV[4])
for _, entry in ipairs(range) do
  local id, fields = entry[1], entry[2]
  local kind, bytes = 'refused', ''
  if #fields == 4 and fields[1] == 'replica' and fields[3] == 'texts' then
    if fields[2] == ARGV[2] then kind = 'own'
    elseif tonumber(string.match(id, '^%d+')) < oldest then kind = 'old'
    elseif #fields[4] <= tonumber(ARGV[5]) then kind, bytes = 'entry', fields[4] end
  end
  found[#found + 1] = {id, kind, bytes}
end
return {known['entries-added'], known['length'], known['last-generated-id'], found}
"""
