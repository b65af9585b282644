"""Thread pool that sends prompt KV on the sockets of connections, bypassing the event loop.

Large transfers through the event loop would delay all other requests. A thread sends for one turn,
while the reader keeps up, but at most `TURN_SECONDS`. Between turns the event loop waits for the
socket to become writable, so a stalled reader occupies no thread. The socket stays non-blocking
because the loop's transport shares it.
"""

import asyncio
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Literal

from service.http.errors import Overloaded, QuotaExceeded
from service.prompt_kv.bandwidth import RateLimiter, ReaderRate, Turns
from service.prompt_kv.handle import DownloadPin
from service.prompt_kv.settings import KvSettings

TURN_SECONDS = 0.25
# Waiting this long in the thread is cheaper than a switch to the event loop and back. A reader
# that keeps up becomes writable sooner.
POLL_SECONDS = 0.02
RETRY_SECONDS = 2.0
TransferOutcome = Literal["complete", "disconnected", "too_slow", "lease_expired"]


class Transfer:
    """State of one prompt-KV download; `send_for_a_turn` runs in a thread."""

    def __init__(self, connection: socket.socket, data: memoryview, rate: ReaderRate) -> None:
        self.connection = connection
        self.rate = rate
        self.is_disconnected = False
        self._data = data
        self._num_sent = 0
        self._poll = select.poll()
        self._poll.register(connection, select.POLLOUT)

    @property
    def is_complete(self) -> bool:
        return self._num_sent == len(self._data)

    def send_for_a_turn(self, limiter: RateLimiter, on_sent: Callable[[int], None]) -> None:
        ends_at = time.monotonic() + TURN_SECONDS
        while not self.is_complete and time.monotonic() < ends_at:
            piece = self._data[self._num_sent : self._num_sent + limiter.piece_bytes]
            try:
                num_bytes = self.connection.send(piece)
            except BlockingIOError:
                if not self._is_writable_soon():
                    return
                continue
            except OSError:
                self.is_disconnected = True
                return
            self._num_sent += num_bytes
            self.rate.on_sent(num_bytes)
            on_sent(num_bytes)
            limiter.acquire(num_bytes)

    async def wait_until_writable(self) -> None:
        """Wait until the socket is writable, at most until the window of the rate check ends."""
        loop, is_writable = asyncio.get_running_loop(), asyncio.Event()
        began = time.monotonic()
        loop.add_writer(self.connection, is_writable.set)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.rate.seconds_left):
                    await is_writable.wait()
        finally:
            loop.remove_writer(self.connection)
            self.rate.on_waited(time.monotonic() - began)

    def _is_writable_soon(self) -> bool:
        began = time.monotonic()
        ready = self._poll.poll(POLL_SECONDS * 1000)
        self.rate.on_waited(time.monotonic() - began)
        return bool(ready)


class SocketSender:
    """Sends prompt-KV downloads in threads: `kv.max_transfers` at a time, others wait."""

    def __init__(
        self,
        settings: KvSettings,
        *,
        on_sent: Callable[[int], None],
        on_ended: Callable[[TransferOutcome], None],
    ) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(settings.max_transfers, thread_name_prefix="kv-data")
        self._turns = Turns(settings.max_transfers)
        self._rate_limiter = RateLimiter(settings.max_bytes_per_second)
        self._on_sent = on_sent
        self._on_ended = on_ended
        self._stopped = False
        self._open: Counter[str] = Counter()
        self._connections: set[socket.socket] = set()

    @property
    def num_transfers(self) -> int:
        return len(self._connections)

    @contextmanager
    def admitted(self, owner: str) -> Iterator[None]:
        """Context manager that counts an open download; beyond the limits it raises an error."""
        self._check_limits(owner)
        self._open[owner] += 1
        try:
            yield
        finally:
            self._open[owner] -= 1
            if not self._open[owner]:
                del self._open[owner]

    async def send(
        self, connection: socket.socket, data: memoryview, *, owner: str, pin: DownloadPin
    ) -> bool:
        """Send `data` on a socket, in turns with other downloads; returns whether all was sent.

        Does not return while a thread reads the data, even if cancelled. Closes `connection`, which
        is a duplicate of the transport's socket.
        """
        rate = ReaderRate(self._settings.min_bytes_per_second, self._settings.slow_reader_seconds)
        outcome: TransferOutcome = "disconnected"
        self._connections.add(connection)
        try:
            outcome = await self._in_turns(Transfer(connection, data, rate), owner, pin)
        finally:
            self._connections.discard(connection)
            connection.close()
            self._on_ended(outcome)
        return outcome == "complete"

    def abort_all(self) -> None:
        """Shut down the sockets of all downloads; their readers get truncated bodies."""
        self._stopped = True
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.abort_all()
        self._threads.shutdown()

    def _check_limits(self, owner: str) -> None:
        limit = self._settings.max_open_transfers
        share = max(1, limit // 2)
        if self._open[owner] >= share:
            raise QuotaExceeded(
                f"an API key may have {share} prompt-KV downloads open; wait until one ends",
                retry_after_seconds=RETRY_SECONDS,
            )
        if self._open.total() >= limit:
            raise Overloaded(
                f"{limit} prompt-KV downloads are open, which is the limit",
                retry_after_seconds=RETRY_SECONDS,
            )

    async def _in_turns(self, transfer: Transfer, owner: str, pin: DownloadPin) -> TransferOutcome:
        while True:
            async with self._turns.turn(owner):
                with pin.turn() as is_leased:
                    if self._stopped:
                        return "disconnected"
                    if not is_leased:
                        return "lease_expired"
                    await self._take_turn(transfer)
            if transfer.is_complete:
                return "complete"
            if transfer.is_disconnected:
                return "disconnected"
            await transfer.wait_until_writable()
            if transfer.rate.is_too_slow:
                return "too_slow"

    async def _take_turn(self, transfer: Transfer) -> None:
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(
            self._threads, transfer.send_for_a_turn, self._rate_limiter, self._on_sent
        )
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            with suppress(OSError):
                transfer.connection.shutdown(socket.SHUT_RDWR)
            await asyncio.wait([work])
            raise
