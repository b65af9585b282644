"""Sends bytes of the arena on a connection's own socket, in a thread, past the event loop.

Through the loop a transfer would cost every other request its turns; here the loop only learns of
its end. The socket stays non-blocking, because the loop's transport shares it: the thread waits for
room itself.
"""

import asyncio
import select
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from service.kv.pace import Pace

PIECE_BYTES = 2**20


class Sending:
    """Owner of the threads; `max_transfers` send at a time, the others wait their turn."""

    def __init__(
        self,
        *,
        max_transfers: int,
        max_bytes_per_second: float | None,
        stall_seconds: float,
        sent: Callable[[int], None],
    ) -> None:
        self._threads = ThreadPoolExecutor(max_transfers, thread_name_prefix="kv-data")
        self._pace = Pace(max_bytes_per_second)
        self._stall_seconds = stall_seconds
        self._sent = sent
        self._over = False
        self._connections: set[socket.socket] = set()

    @property
    def num_transfers(self) -> int:
        return len(self._connections)

    async def send(self, connection: socket.socket, data: memoryview) -> bool:
        """Whether all of it was taken. Does not return, even when cancelled, while a thread reads
        the data; closes the socket, which is one of its own for the same connection."""
        loop = asyncio.get_running_loop()
        self._connections.add(connection)
        work = loop.run_in_executor(self._threads, self._send, connection, data)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            await asyncio.wait([work])
            raise
        finally:
            self._connections.discard(connection)
            connection.close()

    def break_off(self) -> None:
        """Whoever is in the middle of a read is left with a part."""
        self._over = True
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.break_off()
        self._threads.shutdown()

    def _send(self, connection: socket.socket, data: memoryview) -> bool:
        room = select.poll()
        room.register(connection, select.POLLOUT)
        at = 0
        while at < len(data) and not self._over:
            taken = self._send_some(connection, room, data[at : at + PIECE_BYTES])
            if not taken:
                return False
            at += taken
            self._sent(taken)
            self._pace.spend(taken)
        return at == len(data)

    def _send_some(self, connection: socket.socket, room: select.poll, piece: memoryview) -> int:
        """0: the reader has gone, or took nothing for too long."""
        while True:
            try:
                return connection.send(piece)
            except BlockingIOError:
                pass
            except OSError:
                return 0
            if not room.poll(self._stall_seconds * 1000):
                return 0
