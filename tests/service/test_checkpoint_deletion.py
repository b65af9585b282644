"""Deletion of a version's files in a thread."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from service.weights.checkpoint_store import CheckpointStore


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
