"""Cluster registry in Redis 7.0 or later, one Lua script per call.

A call that times out drops its connection; the next call opens a new one. Keys of claims contain
digests, because clients choose the idempotency keys.
"""

import asyncio
import hashlib
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError

from service.cluster import redis_scripts
from service.cluster.entries import MANIFEST, REPLICA, TARGET, parse_entries, parse_entry
from service.cluster.registry import (
    ActivationTarget,
    ClusterView,
    Manifest,
    ManifestConflict,
    RegistryUnavailable,
    Replica,
)
from service.cluster.settings import DirectorySettings

MAX_CONNECTIONS = 16


class RedisRegistry:
    """`ClusterRegistry` in Redis. Connects on the first call."""

    def __init__(self, settings: DirectorySettings) -> None:
        assert settings.redis_url is not None, "redis_url is required"
        self._timeout_seconds = settings.call_seconds
        self._prefix = "{" + settings.key_prefix + "}:"
        self._redis = Redis(connection_pool=_connection_pool(settings.redis_url, settings))
        self._heartbeat = self._redis.register_script(redis_scripts.HEARTBEAT)
        self._leave_script = self._redis.register_script(redis_scripts.LEAVE)
        self._claim_script = self._redis.register_script(redis_scripts.CLAIM)
        self._release_script = self._redis.register_script(redis_scripts.RELEASE)
        self._publish_script = self._redis.register_script(redis_scripts.PUBLISH)
        self._target_script = self._redis.register_script(redis_scripts.TARGET)

    async def beat(self, replica: Replica, *, ttl_seconds: float) -> ClusterView:
        keys = self._keys("replicas", "deadlines", "manifests", "order")
        entry = REPLICA.dump_json(replica)
        answer = await self._call(
            self._heartbeat, keys, replica.id, entry, _milliseconds(ttl_seconds)
        )
        known, replicas, manifests, target = answer
        return ClusterView(
            known=bool(known),
            replicas={found.id: found for found in parse_entries(REPLICA, replicas)},
            manifests={found.version: found for found in parse_entries(MANIFEST, manifests)},
            target=parse_entry(TARGET, target),
        )

    async def leave(self, replica_id: str) -> None:
        await self._call(self._leave_script, self._keys("replicas", "deadlines"), replica_id)

    async def claim(
        self, claim_key: str, replica_id: str, *, ttl_seconds: float, allow_takeover: bool
    ) -> str:
        keys = [self._redis_claim_key(claim_key), *self._keys("deadlines")]
        arguments = (replica_id, _milliseconds(ttl_seconds), int(allow_takeover))
        holder: bytes = await self._call(self._claim_script, keys, *arguments)
        return holder.decode()

    async def release(self, claim_key: str, replica_id: str) -> None:
        await self._call(self._release_script, [self._redis_claim_key(claim_key)], replica_id)

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
        current = await self._call(self._target_script, self._keys("order"), *arguments)
        return parse_entry(TARGET, current) or target

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

    def _redis_claim_key(self, claim_key: str) -> str:
        return f"{self._prefix}claim:{hashlib.sha256(claim_key.encode()).hexdigest()}"


class _PasswordFile(CredentialProvider):
    """Credentials read per connection: Kubernetes updates mounted secrets at run time."""

    def __init__(self, user: str, file: Path) -> None:
        self._user = user
        self._file = file

    def get_credentials(self) -> tuple[str, str]:
        return self._user, self._file.read_text().strip()


def _connection_pool(url: str, settings: DirectorySettings) -> BlockingConnectionPool:
    options: dict[str, Any] = {
        "max_connections": MAX_CONNECTIONS,
        "timeout": settings.call_seconds,
        "socket_timeout": settings.call_seconds,
        "socket_connect_timeout": settings.call_seconds,
        "retry": Retry(NoBackoff(), 0),
    }
    user = settings.redis_user
    if settings.redis_password_file is not None:
        provider = _PasswordFile(user or "default", settings.redis_password_file)
        options["credential_provider"] = provider
    elif settings.redis_password is not None:
        options |= {"username": user, "password": settings.redis_password.get_secret_value()}
    if url.startswith("rediss://"):
        ca_file = settings.tls_ca_file
        options["connection_class"] = SSLConnection
        options["ssl_ca_certs"] = None if ca_file is None else str(ca_file)
    return BlockingConnectionPool.from_url(url, **options)


def _milliseconds(ttl_seconds: float) -> int:
    return max(1, math.ceil(ttl_seconds * 1000))
