"""A replica that accepts requests and never answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from service.cluster.in_memory import InMemoryRegistry
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

    async def shows_itself(self, directory: InMemoryRegistry) -> None:
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
        file = ManifestFile(name="model.safetensors", sha256="0" * 64, num_bytes=1)
        await directory.beat(ghost, ttl_seconds=600)
        await directory.publish(Manifest(version="v9", sequence=9, files=(file,)))


@asynccontextmanager
async def stalled_peer() -> AsyncIterator[Mute]:
    peer = Mute()
    server = await asyncio.start_server(peer.connected, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    peer.url = f"http://{host}:{port}"
    async with server:
        try:
            yield peer
        finally:
            peer.over.set()
