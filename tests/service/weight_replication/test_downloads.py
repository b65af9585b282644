"""Fetches from other replicas and from shared directories, and their time limits."""

import asyncio
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from service.cluster.registry import Manifest, ManifestFile
from service.weights.replication.announcer import same_files
from service.weights.replication.downloader import DownloadFailed, _chunks


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


def test_missing_files_are_not_the_published_ones(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    assert not same_files(Manifest(version="v1", sequence=1, files=()), tmp_path)
