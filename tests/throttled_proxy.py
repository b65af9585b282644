"""TCP proxy on the loopback interface that limits the rate, and can stop passing on responses."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

CHUNK_BYTES = 64


class ThrottledProxy:
    """Proxy to a local port, with bytes per second and per direction of each connection.

    While `responses` is not set, it passes on requests only.
    """

    def __init__(self, port: int, bytes_per_second: float) -> None:
        self.responses = asyncio.Event()
        self.responses.set()
        self._port = port
        self._bytes_per_second = bytes_per_second
        self._connections = set[asyncio.Task[None]]()

    def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def close(self) -> None:
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)
        opened = asyncio.Event()
        opened.set()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(reader, upstream_writer, opened))
                tasks.create_task(self._copy(upstream_reader, writer, self.responses))
        finally:
            writer.close()
            upstream_writer.close()

    async def _copy(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: asyncio.Event
    ) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(CHUNK_BYTES):
                await asyncio.sleep(len(data) / self._bytes_per_second)
                await gate.wait()
                writer.write(data)
                await writer.drain()
            writer.close()


@asynccontextmanager
async def throttled_proxy(
    listening: int, port: int, bytes_per_second: float
) -> AsyncIterator[ThrottledProxy]:
    """Proxy from the port `listening` to `port`."""
    proxy = ThrottledProxy(port, bytes_per_second)
    server = await asyncio.start_server(proxy.on_connection, "127.0.0.1", listening)
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
