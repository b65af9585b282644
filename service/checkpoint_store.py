"""Store of weights files on disk: uploaded ones, and those in allowed directories.

An upload is written to a hidden temporary file and renamed when it is complete, so that a version's
directory never contains a partial file. Only files below the store's own directory are deleted.
"""

import asyncio
import base64
import hashlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO, Self

import xxhash

from coppice.weights import checkpoint_files
from coppice.weights.checkpoint_files import INDEX
from coppice.weights.delta import DeltaRefused, Lineage, apply_delta, lineage_of
from engine.errors import CheckpointRefused
from engine.runtime.leftover_files import create_locked_dir
from engine.weights.checkpoint import read_shards
from service.errors import (
    DigestMismatch,
    InsufficientStorage,
    InvalidRequest,
    PathRefused,
    WeightsRefused,
)

_PREFIX = "weights-"
WRITE_BYTES = 2**20
MAX_DELETION_WAIT_SECONDS = 20.0
"""Longest wait of an upload for deletions. It is below the client's write timeout, 60 s."""
DELTA = ".delta"
"""Name of the uploaded delta in a version's directory; sent to replicas with the base version."""
_FILE_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")
OnBlock = Callable[[bytearray], object]
_DIGEST = re.compile(r"sha-256=:([A-Za-z0-9+/]{43}=):")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """Complete file under a temporary name, to be passed to `keep` or `discard`.

    `xxh3_128` is the checksum of a file that was received over HTTP. `sha256` is computed while a
    file is received, or by `with_sha256` if it turns out to be needed.
    """

    path: Path
    num_bytes: int
    sha256: str | None
    xxh3_128: str | None = None


class CheckpointStore:
    """Stores uploaded checkpoints in a new locked folder below `directory`.

    `open` creates the folder and removes those of servers that were killed; `close` deletes it.
    `sources` are the directories from which weights may be loaded by path.
    """

    def __init__(
        self,
        directory: Path,
        sources: Sequence[Path],
        *,
        max_deletion_wait_seconds: float = MAX_DELETION_WAIT_SECONDS,
    ) -> None:
        self._max_deletion_wait_seconds = max_deletion_wait_seconds
        self._directory = directory
        self._sources = [source.resolve() for source in sources]
        self._root: Path | None = None
        self._lock: BinaryIO | None = None
        self._deletions = set[asyncio.Future[None]]()

    def open(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._root, self._lock = create_locked_dir(_PREFIX, self._directory)

    def close(self) -> None:
        folder, self._root = self._root, None
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def folder(self, label: str) -> Path:
        assert self._root is not None, "open first"
        return self._root / label

    def make_temp_dir(self, prefix: str) -> Path:
        """Create a temporary directory inside the checkpoint store, assigned to no version."""
        return Path(tempfile.mkdtemp(prefix=prefix, dir=self._root))

    async def receive(
        self,
        chunks: AsyncIterator[bytes],
        content_digest: str | None,
        *observers: OnBlock,
        hashes: bool = True,
    ) -> Upload:
        """Stream an upload to disk in bounded memory and hash it.

        `content_digest` is the Content-Digest header. Observers are called in threads with all
        blocks in order. Raises DigestMismatch or InsufficientStorage. Without `hashes` there is a
        SHA-256 only for the comparison with a header: it takes longer than a fast network.
        """
        expected, sha256 = _expected_digest(content_digest), hashlib.sha256()
        hashes = hashes or expected is not None
        if self._deletions:  # their space may be needed
            await asyncio.wait(self._deletions, timeout=self._max_deletion_wait_seconds)
        with self._incoming() as (path, file):
            steps = (sha256.update, *observers) if hashes else observers
            checksum = await _write(file, chunks, steps)
            if expected not in (None, sha256.digest()):
                raise DigestMismatch()
        return Upload(
            path=path,
            num_bytes=path.stat().st_size,
            xxh3_128=checksum,
            sha256=sha256.hexdigest() if hashes else None,
        )

    @contextmanager
    def _incoming(self) -> Iterator[tuple[Path, BinaryIO]]:
        """Context manager of a new file under a temporary name, which an error deletes."""
        handle, name = tempfile.mkstemp(prefix=".incoming-", dir=self._root)
        path = Path(name)
        try:
            with os.fdopen(handle, "wb") as file:
                yield path, file
        except OSError as error:
            path.unlink()
            raise InsufficientStorage() from error
        except BaseException:
            path.unlink()
            raise

    async def lineage(self, delta: Upload) -> Lineage:
        try:
            return await asyncio.to_thread(lineage_of, delta.path)
        except DeltaRefused as refused:
            raise WeightsRefused(f"invalid delta: {refused}") from refused

    async def apply_delta_to(self, base: Path, delta: Upload, expected: str) -> Upload:
        """Apply a weights delta to the checkpoint `base` in a thread; returns the resulting file.

        `expected` is the SHA-256 of the result that the delta declares.
        """
        with self._incoming() as (path, file):
            try:
                digest = await asyncio.to_thread(apply_delta, base, delta.path, file)
            except DeltaRefused as refused:
                raise WeightsRefused(f"invalid delta: {refused}") from refused
            if digest != expected:
                raise DigestMismatch("the SHA-256 of the result is not the one in the delta")
        return Upload(path=path, num_bytes=path.stat().st_size, sha256=digest)

    def keep(self, upload: Upload, label: str, name: str) -> Path:
        folder = self.folder(label)
        folder.mkdir(exist_ok=True)
        upload.path.rename(folder / name)
        return folder

    def discard(self, upload: Upload) -> None:
        upload.path.unlink(missing_ok=True)

    def delete(self, label: str) -> asyncio.Future[None]:
        """Start the deletion of a version's files in a thread, because large files take long.

        They are renamed first, so that the label can be used again at once. The thread goes on if
        the caller is cancelled. The next upload waits for it.
        """
        folder = self.folder(label)
        with suppress(OSError):  # there is no such folder, or no space for another name
            folder = folder.rename(self.folder(f".deleted-{secrets.token_hex(8)}"))
        remove = partial(shutil.rmtree, folder, ignore_errors=True)
        deletion = asyncio.get_running_loop().run_in_executor(None, remove)
        self._deletions.add(deletion)
        deletion.add_done_callback(self._deletions.discard)
        return asyncio.shield(deletion)

    def resolve_allowed(self, path: str) -> Path:
        """Resolve a path and check that it is below a directory that the operator allows.

        It is resolved before the comparison, so `..` and symbolic links cannot escape.
        """
        try:
            resolved = Path(path).resolve()
            inside = any(resolved.is_relative_to(source) for source in self._sources)
            present = inside and resolved.exists()
        except (OSError, ValueError, RuntimeError) as error:  # too long, a NUL, a loop of links
            raise PathRefused() from error
        if not inside:
            raise PathRefused()
        if not present:
            raise PathRefused("no such file or directory")
        return resolved


def validate_file_name(name: str) -> str:
    if not _FILE_NAME.match(name) or not (name == INDEX or name.endswith(".safetensors")):
        raise InvalidRequest.of_parameter("name", f"must be {INDEX} or *.safetensors")
    return name


async def _write(file: BinaryIO, chunks: AsyncIterator[bytes], observers: Sequence[OnBlock]) -> str:
    """Write a stream to a file in large blocks; returns its XXH3 checksum of 128 bits.

    A block is written, and passed to the observers, in threads while the next one is received.
    """
    checksum = xxhash.xxh3_128()

    def write(block: bytearray) -> None:
        checksum.update(block)
        file.write(block)

    async with _BlockWriter([write, *observers]) as writer:
        async for block in _large_blocks(chunks):
            await writer.write(block)
        await writer.finish()
    return checksum.hexdigest()


async def _large_blocks(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytearray]:
    """Join chunks to blocks of at least `WRITE_BYTES`, because each block is passed to threads."""
    joined = bytearray()
    async for chunk in chunks:
        joined += chunk
        if len(joined) >= WRITE_BYTES:
            yield joined
            joined = bytearray()
    yield joined


class _BlockWriter:
    """Passes blocks to functions, each of which runs in a thread.

    Leaving the context waits for the threads, even if the caller was cancelled.
    """

    def __init__(self, steps: Sequence[OnBlock]) -> None:
        self._steps = steps
        self._running = list[asyncio.Future[object]]()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._running:
            await asyncio.wait(self._running)

    async def write(self, block: bytearray) -> None:
        """Start with a block after the previous one; the caller must not change it."""
        await self.finish()
        loop = asyncio.get_running_loop()
        self._running = [loop.run_in_executor(None, step, block) for step in self._steps]

    async def finish(self) -> None:
        if self._running:
            await asyncio.wait(self._running)
        running, self._running = self._running, []
        for step in running:
            step.result()


def _expected_digest(header: str | None) -> bytes | None:
    """SHA-256 in a Content-Digest header (RFC 9530); None if the request has no such header.

    Any other algorithm is refused, because the digest could not be checked.
    """
    if header is None:
        return None
    found = _DIGEST.fullmatch(header)
    if found is None:
        raise InvalidRequest.of_parameter("Content-Digest", "must be sha-256=:<base64>:")
    return base64.b64decode(found.group(1))


async def missing_files(index: Path, present: dict[str, str]) -> tuple[str, ...]:
    """Missing files of a sharded checkpoint: the index, or else shards that the index names."""
    if INDEX not in present:
        return (INDEX,)
    named = await asyncio.to_thread(_named_shards, index)
    return tuple(sorted(name for name in named if name not in present))


def _named_shards(index: Path) -> Iterable[str]:
    """Shards that a checkpoint index names; none if it is invalid, which a later check refuses."""
    try:
        return read_shards(index)
    except CheckpointRefused:
        return ()


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def with_sha256(upload: Upload) -> Upload:
    """The same file with its SHA-256, which is computed in a thread."""
    if upload.sha256 is not None:
        return upload
    return replace(upload, sha256=await asyncio.to_thread(sha256_of, upload.path))


def check_same_files(path: Path, fingerprint: str) -> None:
    """Refuse files that are not the publisher's, whose host may have others at this path."""
    try:
        is_same = checkpoint_files.fingerprint(path) == fingerprint
    except OSError:  # removed meanwhile
        is_same = False
    if not is_same:
        raise PathRefused("the server has other files at this path")


def num_bytes_of(path: Path) -> int:
    """Size of a checkpoint in bytes; WeightsRefused if files were removed since its validation."""
    try:
        files = [path] if not path.is_dir() else path.glob("*.safetensors")
        return sum(file.stat().st_size for file in files)
    except OSError as error:
        raise WeightsRefused("the files changed during the check") from error
