"""Copies of machine 0's files: complete or an error, and only with the token."""

import http.client
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import xxhash

from engine.launch.environment import COPIES_ENV, separate_copies
from engine.launch.worker_machines import MachineMethods
from engine.runtime import leftover_files
from engine.runtime.leftover_files import (
    acquire_lock,
    create_named_dir,
    remove_abandoned_dirs,
)
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
    monkeypatch.setenv(COPIES_ENV, str(tmp_path / "copies" / "engine-0"))
    copies = Copies()
    yield copies
    copies.close()


def source(server: FileServer, path: str = "/not/here/v1") -> CopySource:
    listed = [
        SourceFile(name=f.name, num_bytes=f.stat().st_size, mtime_ns=f.stat().st_mtime_ns)
        for f in server.files
    ]
    return CopySource(path=path, url=server.url, is_initial=False, files=listed)


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
    server: FileServer, copies: Copies, files: list[Path], tmp_path: Path
) -> None:
    asked = source(server)
    other = Copies()
    other.start(asked, local_rank=1)
    assert other.state(asked["path"]) == {"is_ready": False, "error": None}
    copies.start(asked, local_rank=0)
    assert wait_until_done(copies, asked["path"])["is_ready"]
    assert other.state(asked["path"])["is_ready"]
    for rank in (copies, other):
        folder = Path(rank.local_path(asked["path"]))
        for file in files:
            assert (folder / file.name).read_bytes() == file.read_bytes()
    copies.drop(asked["path"])
    wait_until_removed(folder, tmp_path / "copies")
    assert copies.local_path(asked["path"]) == asked["path"]


def test_single_file_is_copied_under_its_name(copies: Copies, files: list[Path]) -> None:
    server = FileServer(LOOPBACK, files[-1:])
    try:
        asked = source(server, "/not/here/model.safetensors")
        copies.start(asked, local_rank=0)
        assert wait_until_done(copies, asked["path"])["is_ready"]
        copied = Path(copies.local_path(asked["path"]))
        assert (copied.name, copied.read_bytes()) == (files[-1].name, files[-1].read_bytes())
    finally:
        server.close()


def test_files_that_a_rank_sees_are_not_copied(
    server: FileServer, copies: Copies, files: list[Path], tmp_path: Path
) -> None:
    asked = source(server, str(files[0].parent))
    copies.start(asked, local_rank=0)
    assert copies.state(asked["path"])["is_ready"]
    assert copies.local_path(asked["path"]) == asked["path"]
    assert not (tmp_path / "copies").exists()


def test_other_files_at_the_same_path_are_not_used(
    server: FileServer, copies: Copies, files: list[Path]
) -> None:
    asked = source(server, str(files[0].parent))
    asked["files"][0]["mtime_ns"] += 1
    copies.start(asked, local_rank=0)
    assert wait_until_done(copies, asked["path"])["is_ready"]
    assert copies.local_path(asked["path"]) != asked["path"]


def test_file_that_changes_meanwhile_is_an_error(
    server: FileServer, copies: Copies, files: list[Path]
) -> None:
    asked = source(server)
    files[-1].write_bytes(b"shorter")
    copies.start(asked, local_rank=0)
    error = wait_until_done(copies, asked["path"])["error"]
    assert error == (
        "CopyFailed: model.safetensors has changed on machine 0, or cannot be read there"
    )


def test_copy_that_is_dropped_meanwhile_leaves_nothing(copies: Copies, tmp_path: Path) -> None:
    content = b"1234"
    listed = [SourceFile(name="model.safetensors", num_bytes=len(content), mtime_ns=0)]
    with socket.create_server((LOOPBACK, 0)) as listener:
        url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/token/"
        asked = CopySource(path="/v1", url=url, is_initial=False, files=listed)
        copies.start(asked, local_rank=0)
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


def replaced(files: list[Path], content: bytes) -> None:
    """Overwrite the weights, as a trainer does that writes each version to the same path."""
    files[-1].write_bytes(content)


def copied(copies: Copies, server: FileServer) -> Path:
    """Directory of the complete copy of the server's files."""
    asked = source(server)
    copies.start(asked, local_rank=0)
    assert wait_until_done(copies, asked["path"])["is_ready"]
    return Path(copies.local_path(asked["path"]))


def wait_until_removed(folder: Path, copies: Path) -> None:
    assert not folder.exists()
    for thread in threading.enumerate():
        if thread.name == "removal":
            thread.join(WAIT_SECONDS)
    assert not list(copies.glob("engine-*/removed-*"))


def test_copy_of_overwritten_files_replaces_the_previous_one(
    server: FileServer, copies: Copies, files: list[Path], tmp_path: Path
) -> None:
    for number in range(3):
        replaced(files, b"%d" % number)
        folder = copied(copies, server)
        copies.keep(source(server)["path"])
        assert (folder / files[-1].name).read_bytes() == b"%d" % number
    for thread in threading.enumerate():
        if thread.name == "removal":
            thread.join(WAIT_SECONDS)
    names = {path.name for path in (tmp_path / "copies" / "engine-0").iterdir()}
    assert names == {".owner", folder.name}


def test_failed_copy_keeps_that_of_the_loaded_files(
    server: FileServer, copies: Copies, files: list[Path]
) -> None:
    path = source(server)["path"]
    loaded = copied(copies, server)
    copies.keep(path)
    replaced(files, b"next")
    asked = source(server)
    asked["url"] = "http://127.0.0.1:1/token/"
    copies.start(asked, local_rank=0)
    assert wait_until_done(copies, path)["error"]
    copies.discard(path)
    assert copies.local_path(path) == str(loaded)
    assert loaded.exists()


def test_files_that_are_loaded_again_are_not_copied_again(
    server: FileServer, copies: Copies, tmp_path: Path
) -> None:
    path = source(server)["path"]
    loaded = copied(copies, server)
    copies.keep(path)
    asked = source(server)
    asked["url"] = "http://127.0.0.1:1/token/"
    for end in (copies.discard, copies.keep):
        copies.start(asked, local_rank=0)
        assert copies.state(path)["is_ready"]
        end(path)
        assert loaded.exists()
    copies.drop(path)
    wait_until_removed(loaded, tmp_path / "copies")


def test_files_of_the_start_are_used_only_while_machine_0_has_them(
    server: FileServer, copies: Copies, files: list[Path]
) -> None:
    path = source(server)["path"]
    copies.set_local_path(path, "/own/model")
    asked = source(server) | {"is_initial": True}
    copies.start(CopySource(**asked), local_rank=0)
    assert copies.state(path)["is_ready"]
    assert copies.local_path(path) == "/own/model"
    assert copied(copies, server) != Path("/own/model")


def test_copy_that_has_not_started_is_not_ready(copies: Copies) -> None:
    assert copies.state("/v1") == {"is_ready": False, "error": "the copy has not started"}


def test_copy_that_cannot_start_is_an_error(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(COPIES_ENV, str(tmp_path / "file" / "engine-0"))
    worker = MachineMethods()
    worker.local_rank = 0
    state = worker.coppice_start_copy(source(server))
    assert not state["is_ready"]
    assert "File exists" in (state["error"] or "")


def test_directory_is_created_again_if_it_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cleanup removes a directory between its creation and its lock."""
    folder, left = tmp_path / "engine-0", [1]

    def acquire(file: int) -> bool:
        if left:
            left.pop()
            shutil.rmtree(next(tmp_path.glob("engine-*")))
        return acquire_lock(file)

    monkeypatch.setattr(leftover_files, "acquire_lock", acquire)
    with create_named_dir(folder, "engine-"):
        remove_abandoned_dirs("engine-", tmp_path)
        assert list(tmp_path.iterdir()) == [folder]


def test_directory_of_another_process_is_an_error_at_once(
    server: FileServer, copies: Copies
) -> None:
    """The start of a copy is an RPC to all ranks, so it must not wait for a lock."""
    worker = MachineMethods()
    worker.local_rank = 0
    with create_named_dir(Path(os.environ[COPIES_ENV]), "engine-"):
        state = worker.coppice_start_copy(source(server))
        assert "another process uses it" in (state["error"] or "")
        assert [path.name for path in Path(os.environ[COPIES_ENV]).parent.iterdir()] == ["engine-0"]


def test_ray_nodes_with_one_home_directory_have_separate_copies(
    server: FileServer, monkeypatch: pytest.MonkeyPatch, copies: Copies
) -> None:
    other, root = Copies(), os.environ[COPIES_ENV]
    for one, node in ((copies, "a"), (other, "b")):
        monkeypatch.setenv(COPIES_ENV, root)
        separate_copies(node)
        assert copied(one, server).is_relative_to(f"{root}-{node}")
    other.close()


def test_server_that_has_ended_is_an_error(server: FileServer, copies: Copies) -> None:
    asked = source(server)
    asked["url"] = "http://127.0.0.1:1/token/"
    copies.start(asked, local_rank=0)
    assert "refused" in (wait_until_done(copies, asked["path"])["error"] or "")


def test_directory_of_a_killed_engine_is_removed(
    server: FileServer, copies: Copies, tmp_path: Path
) -> None:
    left = tmp_path / "copies" / "engine-of-a-killed-process"
    left.mkdir(parents=True)
    (left / ".owner").touch()
    copies.start(source(server), local_rank=0)
    assert not left.exists()


@pytest.mark.parametrize("index", ["3", "-1", "x", "", "9" * 20, "../../etc/passwd"])
def test_server_serves_its_files_only(server: FileServer, index: str) -> None:
    assert get(server.url + index)[0] == 404


def test_server_requires_its_token(server: FileServer) -> None:
    parts = urlsplit(server.url)
    for path in ("/0", "/token/0", "//0", "/" + "x" * 60_000 + "/0"):
        assert get(f"http://{parts.netloc}{path}")[0] in (404, 414)
    assert get(server.url + "0")[0] == 200
