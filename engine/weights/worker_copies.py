"""Copies of machine 0's weights files on another machine, made by its first rank in a thread.

A rank that sees the files of machine 0, on a shared file system, uses them. The directory of the
copies is locked for as long as the first rank runs, and removed by a later engine.
"""

import hashlib
import http.client
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final, TypedDict
from urllib.parse import urlsplit

import xxhash

from engine.launch.environment import copies_directory
from engine.runtime.feature_guard import Failure, attempt
from engine.runtime.leftover_files import LOCK_FILE, acquire_lock, remove_abandoned_dirs
from engine.weights.file_server import CHUNK_BYTES, HASH_BYTES, SEND_SECONDS

PREFIX: Final = "engine-"


class SourceFile(TypedDict):
    """File of machine 0. Equal sizes and times show that a rank sees the same file."""

    name: str
    num_bytes: int
    mtime_ns: int


class CopySource(TypedDict):
    """Files of `path` on machine 0, which serves them below `url` by their index."""

    path: str
    url: str
    files: list[SourceFile]


class CopyState(TypedDict):
    """State of a copy on one rank."""

    is_ready: bool
    error: str | None


class CopyFailed(Exception):
    """A file could not be copied from machine 0."""


class _Copy:
    """A copy that is made in a thread. `folder` exists once all files are complete.

    A cancelled copy leaves nothing, also if its thread still runs then.
    """

    def __init__(self, folder: Path, local_path: Path) -> None:
        self.folder = folder
        self.local_path = local_path
        self.error: str | None = None
        self._is_cancelled = False
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        return self.folder.exists()

    def make(self, source: CopySource) -> None:
        made = attempt(self._make, source)
        if isinstance(made, Failure):
            self.error = made.message

    def _make(self, source: CopySource) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder.parent, prefix="part-") as part:
            files = Path(part) / "files"
            files.mkdir()
            for index, file in enumerate(source["files"]):
                _copy_file(
                    files / file["name"], f"{source['url']}{index}", file["num_bytes"], self.check
                )
            with self._lock:
                self.check()
                files.rename(self.folder)

    def check(self) -> None:
        if self._is_cancelled:
            raise CopyFailed("the copy is no longer needed")

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True


class Copies:
    """Local paths of machine 0's files, in a worker. `start` returns at once."""

    def __init__(self) -> None:
        self._local_paths: dict[str, str] = {}
        self._copies: dict[str, _Copy] = {}
        self._lock: BinaryIO | None = None

    def set_local_path(self, path: str, local_path: str) -> None:
        self._local_paths[path] = local_path

    def local_path(self, path: str) -> str:
        """Path on this machine of a path on machine 0."""
        copy = self._copies.get(path)
        return str(copy.local_path) if copy is not None else self._local_paths.get(path, path)

    def start(self, source: CopySource, *, local_rank: int, engine: str) -> None:
        path = source["path"]
        if (previous := self._copies.pop(path, None)) is not None:
            previous.cancel()
        if path in self._local_paths or _sees(source):
            return
        folder = self._root(engine, owns=local_rank == 0) / _key(str(source["files"]) + path)
        copy = _Copy(folder, folder if _is_directory(source) else folder / Path(path).name)
        self._copies[path] = copy
        if local_rank == 0 and not copy.is_complete:
            threading.Thread(target=copy.make, args=(source,), name="copy", daemon=True).start()

    def state(self, path: str) -> CopyState:
        copy = self._copies.get(path)
        is_ready = copy is None or copy.is_complete
        return CopyState(is_ready=is_ready, error=None if copy is None or is_ready else copy.error)

    def drop(self, path: str) -> None:
        copy = self._copies.pop(path, None)
        if copy is not None and self._lock is not None:
            copy.cancel()
            shutil.rmtree(copy.folder, ignore_errors=True)

    def close(self) -> None:
        """Release the directory, which a later engine removes. The end of the process does so."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _root(self, engine: str, *, owns: bool) -> Path:
        """Directory of this engine's copies; the first rank creates and locks it."""
        root = copies_directory() / f"{PREFIX}{_key(engine)}"
        if owns and self._lock is None:
            root.mkdir(parents=True, exist_ok=True)
            lock = (root / LOCK_FILE).open("wb")
            acquire_lock(lock.fileno())
            self._lock = lock
            remove_abandoned_dirs(PREFIX, root.parent)
        return root


COPIES: Final = Copies()


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _is_directory(source: CopySource) -> bool:
    return [file["name"] for file in source["files"]] != [Path(source["path"]).name]


def _sees(source: CopySource) -> bool:
    path = Path(source["path"])
    root = path if _is_directory(source) else path.parent
    try:
        found = [(root / file["name"]).stat() for file in source["files"]]
    except OSError:
        return False
    expected = [(file["num_bytes"], file["mtime_ns"]) for file in source["files"]]
    return [(one.st_size, one.st_mtime_ns) for one in found] == expected


def _copy_file(target: Path, url: str, num_bytes: int, check: Callable[[], None]) -> None:
    """Copy a file from machine 0, with `check` after each chunk."""
    parts = urlsplit(url)
    assert parts.hostname is not None, "machine 0 has an address"
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=SEND_SECONDS)
    try:
        connection.request("GET", parts.path)
        response = connection.getresponse()
        if response.status != 200 or response.length != num_bytes + HASH_BYTES:
            raise CopyFailed(f"{target.name} has changed on machine 0, or cannot be read there")
        with target.open("xb") as file:
            digest = _receive(response, file, num_bytes, check)
        if response.read(HASH_BYTES) != digest:
            raise CopyFailed(f"{target.name} was received with errors")
    finally:
        connection.close()


def _receive(
    response: http.client.HTTPResponse,
    file: BinaryIO,
    num_bytes: int,
    check: Callable[[], None],
) -> bytes:
    """Write the next `num_bytes` of a response to a file; returns their hash."""
    digest, buffer = xxhash.xxh3_64(), memoryview(bytearray(min(CHUNK_BYTES, max(1, num_bytes))))
    left = num_bytes
    while left:
        received = response.readinto(buffer[: min(left, len(buffer))])
        if not received:
            raise CopyFailed("machine 0 closed the connection")
        digest.update(buffer[:received])
        file.write(buffer[:received])
        left -= received
        check()
    return digest.digest()
