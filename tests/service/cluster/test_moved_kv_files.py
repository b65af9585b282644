"""KV files of another replica are taken only if they are whole and are the expected ones."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
ARENA = f"coppice-kv-{'0' * 32}"
MINUTE = 60.0
SENT_BYTES = 2**16


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
    "path",
    [
        "/dev/shm/other",
        f"/dev/shm/../etc/{ARENA}",
        f"/tmp/{ARENA}",
        ARENA,
        "/dev/shm/coppice-kv-x",
        f"/dev/shm/{ARENA}\0",
        f"/dev/shm/{ARENA}\n",
    ],
)
def test_other_files_are_no_arenas(path: str) -> None:
    assert is_arena(Path(f"/dev/shm/{ARENA}"), Path("/dev/shm"))
    assert not is_arena(Path(path), Path("/dev/shm"))


def test_arena_that_is_a_fifo_or_of_another_user_is_not_opened(
    arena: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="regular"):
        SharedMemory(tmp_path / "fifo")
    monkeypatch.setattr(os, "getuid", lambda: arena.stat().st_uid + 1)
    with pytest.raises(OSError, match="this user"):
        SharedMemory(arena)


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


def send(connection: socket.socket, data: bytes, bytes_per_second: float) -> None:
    """Send data, at most at a rate if there is one, until the other side closes the connection."""
    with suppress(ConnectionError):
        for start in range(0, len(data), SENT_BYTES):
            connection.sendall(data[start : start + SENT_BYTES])
            if bytes_per_second:
                time.sleep(SENT_BYTES / bytes_per_second)


@contextmanager
def source(
    body: bytes,
    *,
    num_sent: int,
    waits: threading.Event | None = None,
    status: str = "200 OK",
    bytes_per_second: float = 0.0,
) -> Iterator[str]:
    """HTTP server that sends the first bytes of a response and then ends, or waits."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                connection.sendall(head)
                send(connection, body[:num_sent], bytes_per_second)
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
        data = read(HttpFiles(url, None, "/kv"))
    assert np.array_equal(np.frombuffer(data, np.float32), fake_kv(TOKENS[32:], "v1").ravel())


@pytest.mark.parametrize("num_sent", [0, 100, LAYOUT.header_bytes, LAYOUT.file_bytes - 1])
def test_source_that_dies_during_the_download_is_a_failure(num_sent: int) -> None:
    failure = pytest.raises(FetchFailed, match="ConnectionFailed")
    with source(file_of(LAYOUT), num_sent=num_sent) as url, failure:
        read(HttpFiles(url, None, "/kv"))


def test_download_from_a_stalled_source_ends_at_the_deadline() -> None:
    stalled = source(file_of(LAYOUT), num_sent=100, waits=threading.Event())
    with stalled as url, pytest.raises(TimeoutError):
        read(HttpFiles(url, None, "/kv"), seconds=0.2)


def test_download_from_a_slow_source_ends_at_the_deadline() -> None:
    """A single piece of 8 MiB would take four seconds."""
    body = bytearray(2**23)
    span = SPAN.model_copy(update={"num_bytes": len(body)})
    slow = source(bytes(body), num_sent=len(body), bytes_per_second=2**21)
    with slow as url:
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            HttpFiles(url, None, "/kv").read(span, [memoryview(body)], Deadline(0.3))
        assert time.monotonic() - started < 2.0


def test_redirect_is_not_followed() -> None:
    place = f"http://127.0.0.1:1/v1/moves/rollout/kv/{SPAN.handle}"
    moved = source(b"", num_sent=0, status=f"307 Temporary Redirect\r\nLocation: {place}")
    with moved as url, pytest.raises(FetchFailed, match="Redirected"):
        read(HttpFiles(url, "Bearer key", "/kv"))
