"""Deletion of a version's files in a thread."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from service.checkpoint_store import CheckpointStore
from tests.fake_engine import FakeEngine
from tests.serving import serving


def deleted(store: CheckpointStore) -> list[Path]:
    return list(store.folder("v1").parent.glob(".deleted-*/model.safetensors"))


async def test_files_are_deleted_in_a_thread_that_outlives_its_caller(tmp_path: Path) -> None:
    store, proceed = CheckpointStore(tmp_path, []), threading.Event()
    store.open()
    folder = store.folder("v1")
    with ThreadPoolExecutor(1) as only_thread:
        asyncio.get_running_loop().set_default_executor(only_thread)
        only_thread.submit(proceed.wait)
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"old")
        deletion = store.delete("v1")
        folder.mkdir()  # the label can be used again
        (folder / "model.safetensors").write_bytes(b"new")
        assert len(deleted(store)) == 1
        deletion.cancel()
        with suppress(asyncio.CancelledError):
            await deletion
        proceed.set()
    assert not deleted(store)
    assert (folder / "model.safetensors").read_bytes() == b"new"
    store.close()


async def test_deletion_of_a_version_without_files_succeeds(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, [])
    store.open()
    await store.delete("v1")
    store.close()


class HoldingExecutor(ThreadPoolExecutor):
    """Threads of which the first task begins only after `proceed` is set; others begin at once."""

    def __init__(self, proceed: threading.Event) -> None:
        super().__init__(4)
        self._proceed = proceed
        self._tasks = itertools.count()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if next(self._tasks):
            return super().submit(fn, *args, **kwargs)
        return super().submit(lambda: self._proceed.wait() and fn(*args, **kwargs))


async def test_next_upload_waits_for_the_deletion(tmp_path: Path) -> None:
    is_deleted: list[bool] = []

    async def chunks() -> AsyncIterator[bytes]:
        is_deleted.append(not deleted(store))
        yield b"new"

    store, proceed = CheckpointStore(tmp_path, []), threading.Event()
    store.open()
    store.folder("v1").mkdir()
    (store.folder("v1") / "model.safetensors").write_bytes(b"old")
    with HoldingExecutor(proceed) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        store.delete("v1")
        assert deleted(store)
        threading.Timer(0.2, proceed.set).start()
        received = await store.receive(chunks(), None)
    assert is_deleted == [True], "nothing is received before the space is free"
    assert received.path.read_bytes() == b"new"
    store.close()


async def test_wait_for_a_deletion_is_bounded(tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"new"

    proceed = threading.Event()
    store = CheckpointStore(tmp_path, [], max_deletion_wait_seconds=0.01)
    store.open()
    store.folder("v1").mkdir()
    (store.folder("v1") / "model.safetensors").write_bytes(b"old")
    with HoldingExecutor(proceed) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        store.delete("v1")
        try:
            received = await asyncio.wait_for(store.receive(chunks(), None), 5)
        finally:
            proceed.set()
    assert received.path.read_bytes() == b"new"
    store.close()


async def test_other_changes_do_not_wait_for_the_deletion_of_a_version(tmp_path: Path) -> None:
    proceed = threading.Event()
    async with serving(FakeEngine(), tmp_path) as served:
        for label in ("v1", "v2"):
            assert (await served.http.put(f"/v1/weights/{label}", content=b"x")).is_success
        with HoldingExecutor(proceed) as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            first, second = (
                asyncio.create_task(served.server.stager.delete(label)) for label in ("v1", "v2")
            )
            try:
                await asyncio.wait_for(second, 5)
                assert not first.done()
            finally:
                proceed.set()
            await first
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))


async def test_activation_does_not_wait_for_the_deletion(tmp_path: Path) -> None:
    proceed = threading.Event()
    async with serving(FakeEngine(), tmp_path, weights={"retain_superseded": 0}) as served:
        for label in ("v1", "v2"):
            assert (await served.http.put(f"/v1/weights/{label}", content=b"x")).is_success
        assert (await served.http.post("/v1/weights/v1/activate", json={})).is_success
        with ThreadPoolExecutor(1) as only_thread:
            asyncio.get_running_loop().set_default_executor(only_thread)
            only_thread.submit(proceed.wait)
            assert (await served.http.post("/v1/weights/v2/activate", json={})).is_success
            assert deleted(served.server.checkpoints)
            proceed.set()
        assert not deleted(served.server.checkpoints)
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
