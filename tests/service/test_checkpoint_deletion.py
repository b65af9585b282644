"""Deletion of a version's files in a thread."""

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from service.weights.checkpoint_store import CheckpointStore
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


async def test_next_upload_waits_for_the_deletion(tmp_path: Path) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"new"

    store, proceed = CheckpointStore(tmp_path, []), threading.Event()
    store.open()
    store.folder("v1").mkdir()
    (store.folder("v1") / "model.safetensors").write_bytes(b"old")
    with ThreadPoolExecutor(1) as only_thread:
        asyncio.get_running_loop().set_default_executor(only_thread)
        only_thread.submit(proceed.wait)
        store.delete("v1")
        receiving = asyncio.create_task(store.receive_unhashed(chunks()))
        await asyncio.sleep(0)
        assert not list(store.folder("v1").parent.glob(".incoming-*"))
        proceed.set()
        received = await receiving
        assert not deleted(store)
        assert received.path.read_bytes() == b"new"
    store.close()


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
