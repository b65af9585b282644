"""The directory of several replicas: Redis 7.0 or later, one script a call.

A call that gets no answer in time is given up, with its connection; the next one makes another. The
names of places are digests, because callers choose their idempotency keys.
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
from service.cluster.entries import MANIFEST, ORDER, REPLICA, read, read_all
from service.cluster.registry import (
    DirectoryLost,
    Manifest,
    ManifestConflict,
    Order,
    Replica,
    Sight,
)
from service.cluster.settings import DirectorySettings

MAX_CONNECTIONS = 16


class RedisDirectory:
    """Connects when it is first asked something."""

    def __init__(self, settings: DirectorySettings) -> None:
        assert settings.redis_url is not None, "without Redis the directory is embedded"
        self._seconds = settings.call_seconds
        self._prefix = "{" + settings.key_prefix + "}:"
        self._redis = Redis(connection_pool=_pool(settings.redis_url, settings))
        self._beat = self._redis.register_script(redis_scripts.BEAT)
        self._leave = self._redis.register_script(redis_scripts.LEAVE)
        self._claim = self._redis.register_script(redis_scripts.CLAIM)
        self._release = self._redis.register_script(redis_scripts.RELEASE)
        self._publish = self._redis.register_script(redis_scripts.PUBLISH)
        self._order = self._redis.register_script(redis_scripts.ORDER)

    async def beat(self, replica: Replica, *, seconds: float) -> Sight:
        keys = self._keys("replicas", "deadlines", "manifests", "order")
        entry = REPLICA.dump_json(replica)
        answer = await self._call(self._beat, keys, replica.id, entry, _milliseconds(seconds))
        known, replicas, manifests, order = answer
        return Sight(
            known=bool(known),
            replicas={found.id: found for found in read_all(REPLICA, replicas)},
            manifests={found.version: found for found in read_all(MANIFEST, manifests)},
            order=read(ORDER, order),
        )

    async def leave(self, replica_id: str) -> None:
        await self._call(self._leave, self._keys("replicas", "deadlines"), replica_id)

    async def claim(self, place: str, replica_id: str, *, seconds: float, take_over: bool) -> str:
        keys = [self._place(place), *self._keys("deadlines")]
        arguments = (replica_id, _milliseconds(seconds), int(take_over))
        holder: bytes = await self._call(self._claim, keys, *arguments)
        return holder.decode()

    async def release(self, place: str, replica_id: str) -> None:
        await self._call(self._release, [self._place(place)], replica_id)

    async def publish(self, manifest: Manifest) -> None:
        arguments = (manifest.version, MANIFEST.dump_json(manifest), manifest.sequence)
        in_the_way = await self._call(self._publish, self._keys("manifests"), *arguments)
        if in_the_way is not None:
            raise ManifestConflict("the version or its sequence is published already")

    async def withdraw(self, version: str) -> None:
        async with self._answering():
            await self._redis.hdel(self._prefix + "manifests", version)

    async def order(self, order: Order) -> Order:
        arguments = (order.epoch, ORDER.dump_json(order))
        standing = await self._call(self._order, self._keys("order"), *arguments)
        return read(ORDER, standing) or order

    async def close(self) -> None:
        with suppress(DirectoryLost):
            async with self._answering():
                await self._redis.aclose(close_connection_pool=True)

    async def _call(self, script: Any, keys: list[str], *arguments: str | bytes | int) -> Any:
        async with self._answering():
            return await script(keys=keys, args=arguments)

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._seconds):
                yield
        except (RedisError, OSError, TimeoutError) as error:
            raise DirectoryLost(type(error).__name__) from error

    def _keys(self, *names: str) -> list[str]:
        return [self._prefix + name for name in names]

    def _place(self, place: str) -> str:
        return f"{self._prefix}claim:{hashlib.sha256(place.encode()).hexdigest()}"


class _FromFile(CredentialProvider):
    """Kubernetes changes a mounted secret under a running server."""

    def __init__(self, user: str, file: Path) -> None:
        self._user = user
        self._file = file

    def get_credentials(self) -> tuple[str, str]:
        return self._user, self._file.read_text().strip()


def _pool(url: str, settings: DirectorySettings) -> BlockingConnectionPool:
    options: dict[str, Any] = {
        "max_connections": MAX_CONNECTIONS,
        "timeout": settings.call_seconds,
        "socket_timeout": settings.call_seconds,
        "socket_connect_timeout": settings.call_seconds,
        "retry": Retry(NoBackoff(), 0),
    }
    user = settings.redis_user
    if settings.redis_password_file is not None:
        provider = _FromFile(user or "default", settings.redis_password_file)
        options["credential_provider"] = provider
    elif settings.redis_password is not None:
        options |= {"username": user, "password": settings.redis_password.get_secret_value()}
    if url.startswith("rediss://"):
        ca_file = settings.tls_ca_file
        options["connection_class"] = SSLConnection
        options["ssl_ca_certs"] = None if ca_file is None else str(ca_file)
    return BlockingConnectionPool.from_url(url, **options)


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))
