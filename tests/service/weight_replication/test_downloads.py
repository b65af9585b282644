"""Fetches from other replicas and from shared directories, and their time limits."""

import asyncio
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save

from service.checkpoint_store import WRITE_BYTES
from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.registry import Manifest, ManifestFile
from service.weights.replication.downloads import DownloadFailed, _chunks
from service.weights.replication.manifests import same_files
from tests.cluster import replica
from tests.fake_engine import FakeEngine
from tests.service.test_weight_deltas import files, put
from tests.service.test_weight_faults import file_size_limit
from tests.service.weight_replication.replicas import (
    eventually,
    fetches,
    is_ready,
    sections,
    serves,
    several,
)
from tests.service.weight_replication.stalled_peer import Dying, stalled_peer


async def drip(writer: asyncio.StreamWriter) -> None:
    """Sends one byte every 10 ms until the client closes the connection."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    with suppress(ConnectionError):
        while not writer.is_closing():
            writer.write(b"w")
            await writer.drain()
            await asyncio.sleep(0.01)
    writer.close()


async def test_peer_that_drips_bytes_is_given_up() -> None:
    file = ManifestFile(name="model.safetensors", sha256="0" * 64, num_bytes=100_000)
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await drip(writer)
        closed.set()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with asyncio.timeout(10), httpx.AsyncClient(base_url=f"http://{host}:{port}") as peer:
            with pytest.raises(DownloadFailed, match=r"less than 1048576 bytes received in 0.2 s"):
                async for _ in _chunks(peer, "v1", file, block_seconds=0.2):
                    pass
        async with asyncio.timeout(10):
            await closed.wait()


async def test_missing_files_are_not_the_published_ones(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    assert not await same_files(Manifest(version="v1", sequence=1, files=()), tmp_path)


@pytest.mark.slow
async def test_source_that_ends_during_a_download_leaves_nothing(tmp_path: Path) -> None:
    directory = InMemoryRegistry()
    async with several(tmp_path, 1, directory) as ((one,), _), stalled_peer(Dying()) as peer:
        before = files(one)
        await peer.shows_itself(directory, num_bytes=100_000)
        await eventually(lambda: fetches(one, "failed") > 0)
        assert files(one) == before
        assert one.server.versions.find("v9") is None
        assert serves(one, "v0") and is_ready(one)


@pytest.mark.slow
async def test_download_to_a_full_disk_leaves_nothing_and_is_repeated(tmp_path: Path) -> None:
    content = save({"a": np.zeros(WRITE_BYTES, dtype=np.float32)})
    directory = InMemoryRegistry()
    async with several(tmp_path, 1, directory) as ((one,), _):
        await put(one, "v1", content)
        async with AsyncExitStack() as stack:
            with file_size_limit(2 * WRITE_BYTES):
                late = replica(tmp_path / "late", FakeEngine(), directory, **sections())
                joined = await stack.enter_async_context(late)
                await eventually(lambda: fetches(joined, "failed") > 0)
                assert joined.server.versions.find("v1") is None
                assert not joined.server.checkpoints.folder("v1").exists()
            await eventually(lambda: joined.server.versions.find("v1") is not None)
            await eventually(lambda: not any(".incoming-" in name for name in files(joined)))
