"""Cluster registry in Redis 7.0 or later, one Lua script per call.

A call that times out drops its connection; the next call opens a new one. Keys of claims contain
digests, because clients choose the idempotency keys.
"""

import asyncio
import hashlib
import logging
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError

from service.cluster.registry import (
    ActivationTarget,
    ClusterView,
    Manifest,
    ManifestConflict,
    RegistryUnavailable,
    Replica,
)
from service.config.cluster import ClusterSettings

MAX_CONNECTIONS = 16
REPLICA = TypeAdapter(Replica)
MANIFEST = TypeAdapter(Manifest)
TARGET = TypeAdapter(ActivationTarget)
T = TypeVar("T")

log = logging.getLogger(__name__)


class RedisRegistry:
    """`ClusterRegistry` in Redis. Connects on the first call."""

    def __init__(self, settings: ClusterSettings) -> None:
        assert settings.redis_url is not None, "redis_url is required"
        self._timeout_seconds = settings.call_seconds
        self._prefix = "{" + settings.key_prefix + "}:"
        self._redis = Redis(connection_pool=_connection_pool(settings.redis_url, settings))
        self._heartbeat = self._redis.register_script(HEARTBEAT_SCRIPT)
        self._leave_script = self._redis.register_script(LEAVE_SCRIPT)
        self._claim_script = self._redis.register_script(CLAIM_SCRIPT)
        self._release_script = self._redis.register_script(RELEASE_SCRIPT)
        self._transfer_script = self._redis.register_script(TRANSFER_SCRIPT)
        self._publish_script = self._redis.register_script(PUBLISH_SCRIPT)
        self._target_script = self._redis.register_script(TARGET_SCRIPT)

    async def beat(self, replica: Replica, *, ttl_seconds: float) -> ClusterView:
        keys = self._keys("replicas", "deadlines", "manifests", "target")
        entry = REPLICA.dump_json(replica)
        answer = await self._call(
            self._heartbeat, keys, replica.id, entry, _milliseconds(ttl_seconds)
        )
        known, replicas, manifests, target = answer
        return ClusterView(
            known=bool(known),
            replicas=_parse_entries(REPLICA, replicas, lambda replica: replica.id),
            manifests=_parse_entries(MANIFEST, manifests, lambda manifest: manifest.version),
            target=_parse_entry(TARGET, target),
        )

    async def leave(self, replica_id: str) -> None:
        await self._call(self._leave_script, self._keys("replicas", "deadlines"), replica_id)

    async def claim(
        self, registry_key: str, replica_id: str, *, ttl_seconds: float, allow_takeover: bool
    ) -> str:
        keys = [self._redis_key(registry_key), *self._keys("deadlines")]
        arguments = (replica_id, _milliseconds(ttl_seconds), int(allow_takeover))
        holder: bytes = await self._call(self._claim_script, keys, *arguments)
        return holder.decode(errors="replace")

    async def release(self, registry_key: str, replica_id: str) -> None:
        await self._call(self._release_script, [self._redis_key(registry_key)], replica_id)

    async def transfer(
        self, registry_key: str, source: str, replica_id: str, *, ttl_seconds: float
    ) -> str:
        keys = [self._redis_key(registry_key)]
        arguments = (source, replica_id, _milliseconds(ttl_seconds))
        holder: bytes = await self._call(self._transfer_script, keys, *arguments)
        return holder.decode(errors="replace")

    async def holder(self, registry_key: str) -> str | None:
        async with self._translate_errors():
            found = await self._redis.get(self._redis_key(registry_key))
        return found.decode(errors="replace") if isinstance(found, bytes) else found

    async def publish(self, manifest: Manifest) -> None:
        arguments = (manifest.version, MANIFEST.dump_json(manifest), manifest.sequence)
        conflict = await self._call(self._publish_script, self._keys("manifests"), *arguments)
        if conflict is not None:
            raise ManifestConflict("the version or its sequence is published already")

    async def withdraw(self, version: str) -> None:
        async with self._translate_errors():
            await self._redis.hdel(self._prefix + "manifests", version)

    async def set_target(self, target: ActivationTarget) -> ActivationTarget:
        arguments = (target.epoch, TARGET.dump_json(target))
        current = await self._call(self._target_script, self._keys("target"), *arguments)
        return _parse_entry(TARGET, current) or target

    async def close(self) -> None:
        with suppress(RegistryUnavailable):
            async with self._translate_errors():
                await self._redis.aclose(close_connection_pool=True)

    async def _call(self, script: Any, keys: list[str], *arguments: str | bytes | int) -> Any:
        async with self._translate_errors():
            return await script(keys=keys, args=arguments)

    @asynccontextmanager
    async def _translate_errors(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_seconds):
                yield
        except (RedisError, OSError, TimeoutError) as error:
            raise RegistryUnavailable(type(error).__name__) from error

    def _keys(self, *names: str) -> list[str]:
        return [self._prefix + name for name in names]

    def _redis_key(self, registry_key: str) -> str:
        return f"{self._prefix}claim:{hashlib.sha256(registry_key.encode()).hexdigest()}"


class _PasswordFile(CredentialProvider):
    """Redis credentials whose password is read from a file for each connection.

    Kubernetes updates mounted secrets at run time.
    """

    def __init__(self, user: str, file: Path) -> None:
        self._user = user
        self._file = file

    def get_credentials(self) -> tuple[str, str]:
        return self._user, self._file.read_text().strip()


def _connection_pool(url: str, settings: ClusterSettings) -> BlockingConnectionPool:
    """Connections with the credentials, timeouts and certificates of the cluster's settings."""
    options: dict[str, Any] = {
        "max_connections": MAX_CONNECTIONS,
        "timeout": settings.call_seconds,
        "socket_timeout": settings.call_seconds,
        "socket_connect_timeout": settings.call_seconds,
        "retry": Retry(NoBackoff(), 0),
    }
    if settings.redis_password_file is not None:
        options["credential_provider"] = _PasswordFile(
            settings.redis_user or "default", settings.redis_password_file
        )
    if url.startswith("rediss://"):
        ca_file = settings.tls_ca_file
        options["connection_class"] = SSLConnection
        options["ssl_ca_certs"] = None if ca_file is None else str(ca_file)
    return BlockingConnectionPool.from_url(url, **options)


def _parse_entry(kind: TypeAdapter[T], entry: bytes | None) -> T | None:
    """Parse a JSON entry of the cluster registry; None if there is none or it is invalid.

    Replicas of other releases write to the same Redis keys.
    """
    if entry is None:
        return None
    try:
        return kind.validate_json(entry)
    except ValidationError:
        log.warning("ignoring an invalid entry of the cluster registry")
        return None


def _parse_entries(
    kind: TypeAdapter[T], hash_entries: Sequence[bytes], key_of: Callable[[T], str]
) -> dict[str, T]:
    """Valid entries of a Redis hash, given as fields and values in turn, by field.

    An entry under another field than its own would replace that of another replica or version.
    """
    pairs = zip(hash_entries[::2], hash_entries[1::2], strict=True)
    parsed = ((field, _parse_entry(kind, entry)) for field, entry in pairs)
    return {
        key_of(found): found
        for field, found in parsed
        if found is not None and key_of(found).encode() == field
    }


def _milliseconds(ttl_seconds: float) -> int:
    return max(1, math.ceil(ttl_seconds * 1000))


# Lua scripts. Expiry is decided by the Redis server's clock. Entries that cannot be parsed are
# ignored. Every key is declared in KEYS, and all have the key prefix as their hash tag, so that
# Redis Cluster stores them on one node.

HEARTBEAT_SCRIPT = """
-- KEYS: replicas, deadlines, manifests, target; ARGV: replica id, entry, TTL in milliseconds
-- Returns: 1 if the replica was registered, else 0; all replicas; all manifests; the target
-- Removes replicas whose deadline has passed, or would not pass within 30 days, or is missing.
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now)
redis.call('ZREMRANGEBYSCORE', KEYS[2], now + 2592000000, '+inf')
for _, id in ipairs(redis.call('HKEYS', KEYS[1])) do
  if not redis.call('ZSCORE', KEYS[2], id) then redis.call('HDEL', KEYS[1], id) end
end
local known = redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) == 0
redis.call('ZADD', KEYS[2], now + ARGV[3], ARGV[1])
return {known and 1 or 0, redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[3]),
        redis.call('GET', KEYS[4])}
"""

LEAVE_SCRIPT = """
-- KEYS: replicas, deadlines; ARGV: replica id
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('ZREM', KEYS[2], ARGV[1])
"""

CLAIM_SCRIPT = """
-- KEYS: claim, deadlines; ARGV: replica id, TTL in milliseconds, 1 to allow a takeover
-- Returns the replica id of the holder. A takeover replaces a holder that is not registered.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local deadline = redis.call('ZSCORE', KEYS[2], holder)
  local expired = not deadline or tonumber(deadline) <= now
  if not (expired and ARGV[3] == '1') then return holder end
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return ARGV[1]
"""

RELEASE_SCRIPT = """
-- KEYS: claim; ARGV: replica id
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""

TRANSFER_SCRIPT = """
-- KEYS: claim; ARGV: replica id of the source, replica id, TTL in milliseconds
-- Returns the replica id of the holder
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] and holder ~= ARGV[2] then return holder end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return ARGV[2]
"""

PUBLISH_SCRIPT = """
-- KEYS: manifests; ARGV: version, entry, sequence
-- Returns the conflicting manifest, if there is one
local entries = redis.call('HGETALL', KEYS[1])
for i = 1, #entries, 2 do
  local version, existing = entries[i], entries[i + 1]
  local parsed, manifest = pcall(cjson.decode, existing)
  if parsed and type(manifest) == 'table' and manifest.version == version and
      type(manifest.sequence) == 'number' and existing ~= ARGV[2] and
      (version == ARGV[1] or manifest.sequence == tonumber(ARGV[3])) then
    return existing
  end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
return false
"""

TARGET_SCRIPT = """
-- KEYS: target; ARGV: epoch, entry
-- Returns the current target: the given one, unless the existing one has an equal or higher epoch
local existing = redis.call('GET', KEYS[1])
local parsed, target = pcall(cjson.decode, existing or '')
if parsed and type(target) == 'table' and type(target.version) == 'string' and
    type(target.epoch) == 'number' and target.epoch < 2^53 and
    target.epoch >= tonumber(ARGV[1]) then return existing end
redis.call('SET', KEYS[1], ARGV[2])
return ARGV[2]
"""
