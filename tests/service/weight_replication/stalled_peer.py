"""A replica that accepts requests and never answers, or ends in the middle of an answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.cluster.in_memory_registry import InMemoryRegistry
from service.cluster.registry import Manifest, ManifestFile, Replica


class Mute:
    """A peer that lists v9 and does not answer requests for it until the test ends."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.over = asyncio.Event()
        self.url = ""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.set()
        await self.over.wait()
        writer.close()

    async def shows_itself(self, directory: InMemoryRegistry, num_bytes: int = 1) -> None:
        ghost = Replica(
            id="ghost",
            url=self.url,
            state="serving",
            version="v9",
            sequence=9,
            epoch=1,
            holds=("v9",),
            staged=("v9",),
        )
        file = ManifestFile(name="model.safetensors", sha256="0" * 64, num_bytes=num_bytes)
        await directory.beat(ghost, ttl_seconds=600)
        await directory.publish(Manifest(version="v9", sequence=9, files=(file,)))


class Dying(Mute):
    """A peer that ends after the first bytes of a file."""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.set()
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nfirst bytes")
        await writer.drain()
        writer.close()


@asynccontextmanager
async def stalled_peer(peer: Mute | None = None) -> AsyncIterator[Mute]:
    peer = peer or Mute()
    server = await asyncio.start_server(peer.connected, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    peer.url = f"http://{host}:{port}"
    async with server:
        try:
            yield peer
        finally:
            peer.over.set()
