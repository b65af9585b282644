"""A raw socket client, for bytes that no conforming HTTP client sends."""

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
        """Status and body of the server's answer before it closes; (0, b"") without one."""
        return parsed(await self.rest())

    async def closed(self) -> bool:
        """True if the server closes the connection without sending anything more."""
        return await self.rest() == b""

    async def rest(self) -> bytes:
        """All bytes until the connection ends, including by a reset.

        A reset occurs if bytes are sent to a server that has already answered.
        """
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
    """The first HTTP response in these bytes."""
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
