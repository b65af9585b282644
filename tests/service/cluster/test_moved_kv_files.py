"""KV files of another replica are taken only if they are whole and are the expected ones."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from coppice.wire.moves import MovedSpan
from service.moves.kv_files import (
    Deadline,
    FetchFailed,
    HttpFiles,
    KvSource,
    SharedMemory,
    is_arena,
    read_checked,
)
from service.prompt_kv.layout import Layout, LayoutFactory, checksums
from tests.fake_export import FORMAT, fake_kv

TOKENS = list(range(96))
LAYOUTS = LayoutFactory("fake", FORMAT)
LAYOUT = LAYOUTS.of(TOKENS, "v1", first_token=32)
OFFSET = 4096
MINUTE = 60.0


def file_of(layout: Layout) -> bytes:
    data = fake_kv(TOKENS[32:], "v1").tobytes()
    return layout.header(checksums(layout, memoryview(data))) + data


SPAN = MovedSpan(
    handle=f"{'0' * 12}.x", start=32, num_tokens=64, num_bytes=LAYOUT.file_bytes, offset=OFFSET
)


def read(source: KvSource, layout: Layout = LAYOUT, seconds: float = MINUTE) -> bytes:
    data = bytearray(layout.data_bytes)
    read_checked(source, SPAN, layout, memoryview(data), Deadline(seconds))
    return bytes(data)


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    path = tmp_path / "coppice-kv-x"
    path.write_bytes(bytes(OFFSET) + file_of(LAYOUT))
    return path


def test_file_is_read_from_shared_memory(arena: Path) -> None:
    assert read(SharedMemory(arena)) == fake_kv(TOKENS[32:], "v1").tobytes()


@pytest.mark.parametrize(
    "other",
    [
        LAYOUTS.of([*TOKENS[:-1], 7], "v1", first_token=32),
        LAYOUTS.of([7, *TOKENS[1:]], "v1", first_token=32),
        LAYOUTS.of(TOKENS, "v2", first_token=32),
        LayoutFactory("other", FORMAT).of(TOKENS, "v1", first_token=32),
    ],
    ids=["last token", "token before", "version", "model"],
)
def test_file_of_something_else_is_refused(arena: Path, other: Layout) -> None:
    with pytest.raises(FetchFailed, match="other tokens"):
        read(SharedMemory(arena), other)


def test_file_of_another_size_is_refused(arena: Path) -> None:
    layout = LAYOUTS.of(TOKENS, "v1", first_token=64)
    with pytest.raises(FetchFailed, match="size"):
        read(SharedMemory(arena), layout)


@pytest.mark.parametrize("position", [OFFSET, OFFSET + LAYOUT.header_bytes + 5, -1])
def test_changed_byte_is_detected(arena: Path, position: int) -> None:
    whole = bytearray(arena.read_bytes())
    whole[position] ^= 1
    arena.write_bytes(whole)
    with pytest.raises(FetchFailed, match="corrupt"):
        read(SharedMemory(arena))


def test_arena_that_ends_early_is_refused(arena: Path) -> None:
    arena.write_bytes(arena.read_bytes()[:-1])
    with pytest.raises(FetchFailed, match="no such file"):
        read(SharedMemory(arena))


@pytest.mark.parametrize(
    "path", ["/dev/shm/other", "/dev/shm/../etc/coppice-kv-x", "/tmp/coppice-kv-x", "coppice-kv-x"]
)
def test_other_files_are_no_arenas(path: str) -> None:
    assert is_arena(Path("/dev/shm/coppice-kv-x"), Path("/dev/shm"))
    assert not is_arena(Path(path), Path("/dev/shm"))


def test_arena_that_is_a_link_is_not_opened(arena: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(arena)
    with pytest.raises(OSError, match="symbolic"):
        SharedMemory(tmp_path / "link")


def test_read_ends_at_the_deadline(arena: Path) -> None:
    with pytest.raises(TimeoutError):
        read(SharedMemory(arena), seconds=0.0)
    deadline = Deadline(MINUTE)
    deadline.end()
    with pytest.raises(TimeoutError):
        deadline.check()


@contextmanager
def source(body: bytes, *, num_sent: int, waits: threading.Event | None = None) -> Iterator[str]:
    """HTTP server that sends the first bytes of a response and then ends, or waits."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                connection.sendall(head + body[:num_sent])
                if waits is not None:
                    waits.wait(MINUTE)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        if waits is not None:
            waits.set()
        thread.join()


def test_file_is_read_by_http() -> None:
    body = file_of(LAYOUT)
    with source(body, num_sent=len(body)) as url:
        data = read(HttpFiles(url, None, "rollout"))
    assert np.array_equal(np.frombuffer(data, np.float32), fake_kv(TOKENS[32:], "v1").ravel())


@pytest.mark.parametrize("num_sent", [0, 100, LAYOUT.header_bytes, LAYOUT.file_bytes - 1])
def test_source_that_dies_during_the_download_is_a_failure(num_sent: int) -> None:
    failure = pytest.raises(FetchFailed, match="ConnectionFailed")
    with source(file_of(LAYOUT), num_sent=num_sent) as url, failure:
        read(HttpFiles(url, None, "rollout"))


def test_download_from_a_stalled_source_ends_at_the_deadline() -> None:
    stalled = source(file_of(LAYOUT), num_sent=100, waits=threading.Event())
    with stalled as url, pytest.raises(TimeoutError):
        read(HttpFiles(url, None, "rollout"), seconds=0.2)
