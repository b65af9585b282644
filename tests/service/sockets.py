"""A client that speaks bytes, for what no well-behaved client would send."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import h11

from tests.serving import Served


@dataclass(frozen=True)
class Raw:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> tuple[int, bytes]:
        """Status and body of what the server answers before it closes; (0, b"") for nothing."""
        return parsed(await self.rest())

    async def closed(self) -> bool:
        """Whether the server drops the connection without another word."""
        return await self.rest() == b""

    async def rest(self) -> bytes:
        """All that comes before the end, be it a reset: what was sent to a server that had already
        answered makes one."""
        received = b""
        try:
            while chunk := await asyncio.wait_for(self.reader.read(2**16), 10):
                received += chunk
        except ConnectionError:
            pass
        return received


@asynccontextmanager
async def raw(served: Served, **options: Any) -> AsyncIterator[Raw]:
    address = urlsplit(served.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port, **options)
    try:
        yield Raw(reader, writer)
    finally:
        writer.close()


def parsed(data: bytes) -> tuple[int, bytes]:
    """The first answer in these bytes."""
    if not data:
        return 0, b""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(data)
    status, content = 0, b""
    while type(event := parser.next_event()) in (h11.Response, h11.Data, h11.InformationalResponse):
        if isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            content += bytes(event.data)
    return status, content
