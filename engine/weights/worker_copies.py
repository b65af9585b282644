"""Copies of machine 0's weights files on another machine, made by its first rank in a thread.

A rank that sees the files of machine 0, on a shared file system, uses them. The directory of the
copies is locked for as long as the first rank runs, and removed by a later engine.
"""

import hashlib
import http.client
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Final, TypedDict
from urllib.parse import urlsplit

import xxhash

from engine.launch.environment import COPIES_PREFIX, copies_directory
from engine.runtime.feature_guard import Failure, attempt
from engine.runtime.leftover_files import create_named_dir
from engine.weights.file_server import CHUNK_BYTES, HASH_BYTES, SEND_SECONDS


class SourceFile(TypedDict):
    """File of machine 0. Equal sizes and times show that a rank sees the same file."""

    name: str
    num_bytes: int
    mtime_ns: int


class CopySource(TypedDict):
    """Files of `path` on machine 0, which serves them below `url` by their index.

    `is_initial`: they are those that the engine started from, which every machine has.
    """

    path: str
    url: str
    is_initial: bool
    files: list[SourceFile]


class CopyState(TypedDict):
    """State of a copy on one rank."""

    is_ready: bool
    error: str | None


class CopyFailed(Exception):
    """A file could not be copied from machine 0."""


class _Copy:
    """A copy that is made in a thread. `folder` exists once all files are complete.

    A cancelled copy leaves nothing, also if its thread still runs then. Without a folder the files
    at `local_path` are not a copy.
    """

    def __init__(self, local_path: Path, folder: Path | None = None) -> None:
        self.folder = folder
        self.local_path = local_path
        self.error: str | None = None
        self._is_cancelled = False
        self._lock = threading.Lock()

    @property
    def is_complete(self) -> bool:
        return self.folder is None or self.folder.exists()

    def make(self, source: CopySource, removals: Sequence[threading.Thread]) -> None:
        """Copy the files once the room of removed copies is free."""
        for removal in removals:
            removal.join()
        made = attempt(self._make, source)
        if isinstance(made, Failure):
            self.error = made.message

    def _make(self, source: CopySource) -> None:
        assert self.folder is not None, "files that are seen are not copied"
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
    """Local paths of machine 0's files, in a worker. No method waits for a copy or a removal.

    A path has at most two copies: that of the loaded files, and that of the next ones, which
    become the loaded ones with `keep`.
    """

    def __init__(self) -> None:
        self._local_paths: dict[str, str] = {}
        self._loaded: dict[str, _Copy] = {}
        self._next: dict[str, _Copy] = {}
        self._removals: list[threading.Thread] = []
        self._lock: BinaryIO | None = None

    def set_local_path(self, path: str, local_path: str) -> None:
        """Set the path of the files that the engine starts from."""
        self._local_paths[path] = local_path

    def local_path(self, path: str) -> str:
        """Path on this machine of the files that are at a path on machine 0 now."""
        copy = self._next.get(path) or self._loaded.get(path)
        return self._local_paths.get(path, path) if copy is None else str(copy.local_path)

    def start(self, source: CopySource, *, local_rank: int) -> None:
        path = source["path"]
        self.discard(path)
        copy = self._next[path] = self._new_copy(source, owns=local_rank == 0)
        if local_rank == 0 and not copy.is_complete:
            removals = [thread for thread in self._removals if thread.is_alive()]
            threading.Thread(
                target=copy.make, args=(source, removals), name="copy", daemon=True
            ).start()

    def _new_copy(self, source: CopySource, *, owns: bool) -> _Copy:
        path = Path(source["path"])
        if source["is_initial"] and source["path"] in self._local_paths:
            return _Copy(Path(self._local_paths[source["path"]]))
        if _sees(source):
            return _Copy(path)
        folder = self._root(owns=owns) / _key(str(source["files"]) + source["path"])
        return _Copy(folder if _is_directory(source) else folder / path.name, folder)

    def state(self, path: str) -> CopyState:
        copy = self._next.get(path) or self._loaded.get(path)
        if copy is None:
            return CopyState(is_ready=False, error="the copy has not started")
        is_ready = copy.is_complete
        return CopyState(is_ready=is_ready, error=None if is_ready else copy.error)

    def keep(self, path: str) -> None:
        """Remove the previous copy of a path whose next copy has been loaded."""
        copy = self._next.pop(path, None)
        if copy is not None:
            previous = self._loaded.get(path)
            self._loaded[path] = copy
            self._remove(previous)

    def discard(self, path: str) -> None:
        """Remove the next copy of a path, which has not been loaded."""
        self._remove(self._next.pop(path, None))

    def drop(self, path: str) -> None:
        """Remove the copies of a path that is loaded no more."""
        self.discard(path)
        self._remove(self._loaded.pop(path, None))

    def _remove(self, copy: _Copy | None) -> None:
        """Rename the folder, and delete it in a thread: sampling may be paused."""
        in_use = [used.folder for used in (*self._loaded.values(), *self._next.values())]
        if copy is None or copy.folder is None or copy.folder in in_use:
            return
        copy.cancel()
        if self._lock is None or not copy.folder.exists():
            return
        removed = Path(tempfile.mkdtemp(dir=copy.folder.parent, prefix="removed-"))
        copy.folder.rename(removed / "files")
        thread = threading.Thread(target=_delete, args=(removed,), name="removal", daemon=True)
        self._removals = [*(one for one in self._removals if one.is_alive()), thread]
        thread.start()

    def close(self) -> None:
        """Release the directory, which a later engine removes. The end of the process does so."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _root(self, *, owns: bool) -> Path:
        """Directory of this engine's copies; the first rank creates and locks it."""
        root = copies_directory()
        if owns and self._lock is None:
            self._lock = create_named_dir(root, COPIES_PREFIX)
        return root


COPIES: Final = Copies()


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


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
