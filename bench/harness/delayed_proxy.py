"""TCP proxy on the loopback interface with a round-trip time and a window per connection.

A sender may have one window of bytes that the receiver has not acknowledged yet, and so sends at
most one window per round trip, as over a real network. The kernel's buffers add a few megabytes at
the start of a connection.
"""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

CHUNK_BYTES = 2**16


class DelayedProxy:
    """Proxy to a local port. `window_bytes` is that of each connection and direction."""

    def __init__(self, port: int, round_trip_seconds: float, window_bytes: int) -> None:
        self._port = port
        self._round_trip_seconds = round_trip_seconds
        self._num_chunks = window_bytes // CHUNK_BYTES

    async def serve(self, listening: socket.socket) -> None:
        """Serve until cancelled."""
        server = await asyncio.start_server(self._on_connection, sock=listening)
        with suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        server.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _on_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Copy in both directions until both have ended, or the connection is reset."""
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)
        with closing(writer), closing(upstream_writer), suppress(asyncio.CancelledError):
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._copy(reader, upstream_writer))
                    tasks.create_task(self._copy(upstream_reader, writer))
            except* ConnectionError:
                pass  # the other side of the connection is closed, too

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        window = asyncio.Semaphore(self._num_chunks)
        in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._deliver(in_flight, window, writer))
            await self._receive(reader, window, in_flight)

    async def _receive(
        self,
        reader: asyncio.StreamReader,
        window: asyncio.Semaphore,
        in_flight: asyncio.Queue[tuple[float, bytes]],
    ) -> None:
        """Receive until the end of the stream; its bytes are due after half a round trip."""
        loop, data = asyncio.get_running_loop(), b"."
        while data:
            await window.acquire()
            data = await reader.read(CHUNK_BYTES)
            in_flight.put_nowait((loop.time() + self._round_trip_seconds / 2, data))

    async def _deliver(
        self,
        in_flight: asyncio.Queue[tuple[float, bytes]],
        window: asyncio.Semaphore,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Deliver bytes, whose acknowledgements take the other half of the round trip."""
        loop, data = asyncio.get_running_loop(), b"."
        while data:
            due, data = await in_flight.get()
            await asyncio.sleep(due - loop.time())
            writer.write(data)
            await writer.drain()
            loop.call_later(self._round_trip_seconds / 2, window.release)
        writer.write_eof()


@contextmanager
def delayed_proxy(port: int, round_trip_seconds: float, window_bytes: int) -> Iterator[int]:
    """Port of a proxy that runs in a thread."""
    listening = socket.create_server(("127.0.0.1", 0))
    proxy = DelayedProxy(port, round_trip_seconds, window_bytes)
    loop = asyncio.new_event_loop()
    serving = loop.create_task(proxy.serve(listening))
    thread = threading.Thread(target=loop.run_until_complete, args=(serving,))
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()
        loop.close()
