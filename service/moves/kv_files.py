"""Prompt-KV files of another replica, read into memory of this process and checked."""

import errno
import os
import re
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Protocol

from coppice.errors import CoppiceError, Redirected
from coppice.prompt_kv.host import read_boot_id
from coppice.prompt_kv.http_client import Download, KvHttpClient
from coppice.transport.redirects import RedirectPolicy, ServerAddress
from coppice.wire.moves import MovedSpan
from engine.protocol import Engine
from service.cluster.membership import ClusterMembership
from service.kv_reuse.span_cache import CacheEntry, SpanCache
from service.prompt_kv.arena import PREFIX
from service.prompt_kv.layout import Layout, LayoutFactory, checksums
from service.weights.replication.allowed_peers import Peers

MAX_SECONDS = 10.0
"""Maximum time in which the KV of a rollout or of a handle is fetched."""
PIECE_BYTES = 2**18
"""Bytes between two checks of the deadline."""
_ARENA_NAME = re.compile(PREFIX + "[0-9a-f]{32}")


class FetchFailed(Exception):
    """The KV could not be fetched, or is not the expected one; the message is the reason."""


class Deadline:
    """Time at which a fetch in a thread must end, which may be moved to now."""

    def __init__(self, seconds: float) -> None:
        self._at = time.monotonic() + seconds
        self._is_over = threading.Event()

    def end(self) -> None:
        self._is_over.set()

    @property
    def seconds_left(self) -> float:
        return 0.0 if self._is_over.is_set() else max(0.0, self._at - time.monotonic())

    def check(self) -> float:
        """Seconds left; raises TimeoutError if there are none."""
        if not (seconds := self.seconds_left):
            raise TimeoutError("the time for the KV of moved samples is over")
        return seconds


class KvSource(Protocol):
    """Files of the sending replica. All methods block."""

    def read(self, span: MovedSpan, parts: list[memoryview], deadline: Deadline) -> None:
        """Fill consecutive parts with a file. Raises FetchFailed or TimeoutError."""

    def close(self) -> None: ...


class SharedMemory:
    """Arena of a replica on the same host. Raises OSError if there is none of this user."""

    def __init__(self, path: Path) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # opens FIFOs at once
        self._file = os.open(path, flags)
        status = os.fstat(self._file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            os.close(self._file)
            raise PermissionError(errno.EPERM, "not a regular file of this user", str(path))

    def read(self, span: MovedSpan, parts: list[memoryview], deadline: Deadline) -> None:
        offset = span.offset
        for piece in _pieces(parts):
            deadline.check()
            try:
                is_complete = os.preadv(self._file, [piece], offset) == len(piece)
            except OSError as error:
                raise FetchFailed(f"the arena: {error.strerror}") from error
            if not is_complete:
                raise FetchFailed("the arena has no such file")
            offset += len(piece)

    def close(self) -> None:
        os.close(self._file)


class NoRedirects(RedirectPolicy):
    """Redirect policy that follows none: another address may not be in `weights.peers`."""

    def redirect_base_url(self, location: str | None, path: str) -> str:
        raise Redirected("redirects between replicas are not followed")


class HttpFiles:
    """Files at a path of a replica's URL, read by HTTP on one connection per file."""

    def __init__(self, url: str, authorization: str | None, path: str) -> None:
        self._url = url.rstrip("/")
        self._authorization = authorization
        self._path = path

    def read(self, span: MovedSpan, parts: list[memoryview], deadline: Deadline) -> None:
        address = ServerAddress(base_url=self._url, authorization=self._authorization)
        client = KvHttpClient(address, deadline.check(), NoRedirects(self._url))
        path = f"{self._path}/{span.handle}"
        download = Download(client, path, span.num_bytes, attempts=1)
        try:
            for piece in _pieces(parts):
                deadline.check()
                download.readinto(piece)
        except CoppiceError as error:
            deadline.check()
            raise FetchFailed(f"the download failed: {type(error).__name__}") from error
        finally:
            download.close()

    def close(self) -> None:
        """No-op: each file has its own connection."""


def is_arena(path: Path, directory: Path) -> bool:
    """True if a path is that of an arena in the shared memory of this replica."""
    return path.parent == directory and _ARENA_NAME.fullmatch(path.name) is not None


class KvSources:
    """Access to the files of other replicas: by shared memory on this host, or else by HTTP."""

    def __init__(self, cluster: ClusterMembership, peers: Peers, directory: Path) -> None:
        self._cluster = cluster
        self._peers = peers
        self._directory = directory
        self._boot_id = read_boot_id()

    def open(self, replica_id: str, boot_id: str | None, arena: str, path: str) -> KvSource:
        """Files of a replica, in the `arena` of a host, or at a path of the replica's URL.

        Raises FetchFailed if its address is not allowed.
        """
        file = Path(arena)
        if self._boot_id == boot_id and is_arena(file, self._directory):
            with suppress(OSError):
                return SharedMemory(file)
        replica = self._cluster.view.replicas.get(replica_id)
        if replica is None or not self._peers.allows(replica.url):
            raise FetchFailed("the address of its source is not in weights.peers")
        try:
            headers = self._peers.headers()
        except OSError as error:
            raise FetchFailed(f"weights.peer_key_file: {error.strerror}") from error
        return HttpFiles(replica.url, headers.get("Authorization"), path)


class EntryReader:
    """Reader of the KV of other replicas into entries of the span cache, in the caller's thread."""

    def __init__(self, engine: Engine, cache: SpanCache) -> None:
        self._engine = engine
        self._cache = cache

    def read(
        self,
        source: KvSource,
        span: MovedSpan,
        entry: CacheEntry,
        token_ids: Sequence[int],
        version: str,
        deadline: Deadline,
    ) -> None:
        """Copy a file, which must be that of these tokens and this weights version.

        `token_ids` are those up to the end of the span. Raises FetchFailed or TimeoutError.
        """
        deadline.check()
        layout = self._layouts.of(token_ids, version, first_token=span.start)
        if not self._cache.allocate_pages(entry):
            raise FetchFailed("the shared-memory mount is full")
        start = entry.slot.offset
        data = self._cache.view[start : start + layout.data_bytes]
        read_checked(source, span, layout, data, deadline)

    @cached_property
    def _layouts(self) -> LayoutFactory:
        info = self._engine.info
        assert info.kv_format is not None, "the cache is open"
        return LayoutFactory(info.model, info.kv_format)


def read_checked(
    source: KvSource, span: MovedSpan, layout: Layout, data: memoryview, deadline: Deadline
) -> bytes:
    """Header of a file; fills `data` with its tensors.

    The file must have this layout and these checksums. Raises FetchFailed or TimeoutError.
    """
    if span.num_bytes != layout.file_bytes:
        raise FetchFailed("the file has another size")
    header = bytearray(layout.header_bytes)
    source.read(span, [memoryview(header), data], deadline)
    if layout.header(checksums(layout, data)) != header:
        raise FetchFailed("the file is of other tokens or weights, or corrupt")
    return bytes(header)


def _pieces(parts: list[memoryview]) -> list[memoryview]:
    return [
        part[start : start + PIECE_BYTES]
        for part in parts
        for start in range(0, len(part), PIECE_BYTES)
    ]
