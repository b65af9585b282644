"""Copies of machine 0's files: complete or an error, and only with the token."""

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import xxhash

from engine.launch.environment import COPIES_ENV
from engine.weights.file_server import FileServer
from engine.weights.worker_copies import Copies, CopySource, CopyState, SourceFile

LOOPBACK = "127.0.0.1"
WAIT_SECONDS = 20.0


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    folder = tmp_path / "v1"
    folder.mkdir()
    contents = {
        "config.json": b"{}",
        "empty.json": b"",
        "model.safetensors": bytes(range(256)) * 70,
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return sorted(folder.iterdir())


@pytest.fixture
def server(files: list[Path]) -> Iterator[FileServer]:
    server = FileServer(LOOPBACK, files)
    yield server
    server.close()


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    monkeypatch.setenv(COPIES_ENV, str(tmp_path / "copies"))
    copies = Copies()
    yield copies
    copies.close()


def source(server: FileServer, path: str = "/not/here/v1") -> CopySource:
    listed = [
        SourceFile(name=f.name, num_bytes=f.stat().st_size, mtime_ns=f.stat().st_mtime_ns)
        for f in server.files
    ]
    return CopySource(path=path, url=server.url, files=listed)


def wait_until_done(copies: Copies, path: str) -> CopyState:
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        state = copies.state(path)
        if state["is_ready"] or state["error"] is not None:
            return state
        time.sleep(0.01)
    raise AssertionError("the copy has not ended")


def get(url: str) -> tuple[int, bytes]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=WAIT_SECONDS)
    try:
        connection.request("GET", parts.path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_files_are_copied_for_all_ranks_of_a_machine(
    server: FileServer, copies: Copies, files: list[Path]
) -> None:
    asked = source(server)
    other = Copies()
    other.start(asked, local_rank=1, engine="one")
    assert other.state(asked["path"]) == {"is_ready": False, "error": None}
    copies.start(asked, local_rank=0, engine="one")
    assert wait_until_done(copies, asked["path"])["is_ready"]
    assert other.state(asked["path"])["is_ready"]
    for rank in (copies, other):
        folder = Path(rank.local_path(asked["path"]))
        for file in files:
            assert (folder / file.name).read_bytes() == file.read_bytes()
    copies.drop(asked["path"])
    assert not folder.exists()
    assert copies.local_path(asked["path"]) == asked["path"]


def test_single_file_is_copied_under_its_name(copies: Copies, files: list[Path]) -> None:
    server = FileServer(LOOPBACK, files[-1:])
    try:
        asked = source(server, "/not/here/model.safetensors")
        copies.start(asked, local_rank=0, engine="one")
        assert wait_until_done(copies, asked["path"])["is_ready"]
        copied = Path(copies.local_path(asked["path"]))
        assert (copied.name, copied.read_bytes()) == (files[-1].name, files[-1].read_bytes())
    finally:
        server.close()


def test_files_that_a_rank_sees_are_not_copied(
    server: FileServer, copies: Copies, files: list[Path], tmp_path: Path
) -> None:
    asked = source(server, str(files[0].parent))
    copies.start(asked, local_rank=0, engine="one")
    assert copies.state(asked["path"])["is_ready"]
    assert copies.local_path(asked["path"]) == asked["path"]
    assert not (tmp_path / "copies").exists()


def test_other_files_at_the_same_path_are_not_used(
    server: FileServer, copies: Copies, files: list[Path]
) -> None:
    asked = source(server, str(files[0].parent))
    asked["files"][0]["mtime_ns"] += 1
    copies.start(asked, local_rank=0, engine="one")
    assert wait_until_done(copies, asked["path"])["is_ready"]
    assert copies.local_path(asked["path"]) != asked["path"]


def test_file_that_changes_meanwhile_is_an_error(
    server: FileServer, copies: Copies, files: list[Path]
) -> None:
    asked = source(server)
    files[-1].write_bytes(b"shorter")
    copies.start(asked, local_rank=0, engine="one")
    error = wait_until_done(copies, asked["path"])["error"]
    assert error == (
        "CopyFailed: model.safetensors has changed on machine 0, or cannot be read there"
    )


def test_copy_that_is_dropped_meanwhile_leaves_nothing(copies: Copies, tmp_path: Path) -> None:
    content = b"1234"
    listed = [SourceFile(name="model.safetensors", num_bytes=len(content), mtime_ns=0)]
    with socket.create_server((LOOPBACK, 0)) as listener:
        url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/token/"
        copies.start(CopySource(path="/v1", url=url, files=listed), local_rank=0, engine="one")
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "copy"]
        connection, _ = listener.accept()
        with connection:
            copies.drop("/v1")
            answer = content + xxhash.xxh3_64(content).digest()
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n"
            connection.sendall(head.encode() + answer)
            thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    assert [path.name for path in (tmp_path / "copies").glob("engine-*/*")] == [".owner"]


def test_server_that_has_ended_is_an_error(server: FileServer, copies: Copies) -> None:
    asked = source(server)
    asked["url"] = "http://127.0.0.1:1/token/"
    copies.start(asked, local_rank=0, engine="one")
    assert "refused" in (wait_until_done(copies, asked["path"])["error"] or "")


def test_directory_of_a_killed_engine_is_removed(
    server: FileServer, copies: Copies, tmp_path: Path
) -> None:
    left = tmp_path / "copies" / "engine-of-a-killed-process"
    left.mkdir(parents=True)
    (left / ".owner").touch()
    copies.start(source(server), local_rank=0, engine="one")
    assert not left.exists()


@pytest.mark.parametrize("index", ["3", "-1", "x", "", "9" * 20, "../../etc/passwd"])
def test_server_serves_its_files_only(server: FileServer, index: str) -> None:
    assert get(server.url + index)[0] == 404


def test_server_requires_its_token(server: FileServer) -> None:
    parts = urlsplit(server.url)
    for path in ("/0", "/token/0", "//0", "/" + "x" * 60_000 + "/0"):
        assert get(f"http://{parts.netloc}{path}")[0] in (404, 414)
    assert get(server.url + "0")[0] == 200
