"""uvicorn's HTTP protocol with large request bodies in large blocks.

uvicorn copies each part of a body four times on the event loop. Here the event loop reads the rest
of a large body of known length from the socket into the block that the ASGI app receives.
"""

import asyncio
from typing import Final, cast

import httptools
from uvicorn._types import ASGI3Application, ASGIReceiveEvent, Scope
from uvicorn._types import ASGIReceiveCallable as Receive
from uvicorn._types import ASGISendCallable as Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MIN_REST_BYTES: Final = 2**18
"""Size of the smallest rest of a body that is received in blocks."""
MIN_BLOCK_BYTES: Final = 2**14
"""Size of the first block."""
MAX_BLOCK_BYTES: Final = 2**20
ALIGNMENT: Final = 64
"""Blocks end at multiples of it, so that the numbers in a file are aligned in each block."""
FLUSH_SECONDS: Final = 0.02
"""Time after the first byte of a block until the app receives the block if it is not full."""


class BlockProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol, which another protocol replaces while a large body arrives."""

    body_bytes = 0
    """Length of the last request's body; 0 if it is not known in advance."""
    body_bytes_left = 0
    """Bytes of this body that the parser has not received."""

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        lengths = (int(value) for name, value in self.headers if name == b"content-length")
        self.body_bytes = self.body_bytes_left = next(lengths, 0)

    def on_body(self, body: bytes) -> None:
        self.body_bytes_left -= len(body)
        super().on_body(body)

    def on_reading_paused(self) -> None:
        """Callback when the app has not taken a full block yet."""

    def end_body(self) -> None:
        """Continue with the next request after a body that the parser has not received."""
        self.new_parser()
        self.on_message_complete()

    def new_parser(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        async def with_blocks(scope: Scope, receive: Receive, send: Send) -> None:
            await app(scope, _BodyReceiver(self, cycle).receive, send)

        super()._start_asgi_task(cycle, with_blocks)


class _BodyReceiver:
    """ASGI `receive` of one request: after the first part of a large body come blocks."""

    def __init__(self, http: BlockProtocol, cycle: RequestResponseCycle) -> None:
        self._http = http
        self._cycle = cycle
        self._blocks: _Blocks | None = None

    async def receive(self) -> ASGIReceiveEvent:
        if self._blocks is not None and not self._blocks.is_over:
            return await self._blocks.receive()
        message = await self._cycle.receive()
        if message["type"] == "http.request" and message["more_body"]:
            self._start_blocks()
        return message

    def _start_blocks(self) -> None:
        is_parsing_body = self._http.cycle is self._cycle and self._cycle.more_body
        if is_parsing_body and self._http.body_bytes_left >= MIN_REST_BYTES:
            self._blocks = _Blocks(self._http, self._cycle)


class _Blocks(asyncio.BufferedProtocol):
    """Protocol of a connection until the end of a request's body, which it receives in blocks.

    One block is filled in advance. It is allocated when bytes arrive, so a client that sends none
    occupies no memory. The size doubles after a full block, up to `MAX_BLOCK_BYTES`, and halves
    after a block that is less than half full, so a slow client occupies a small one. Once the
    response is complete, the rest of the body is dropped.
    """

    def __init__(self, http: BlockProtocol, cycle: RequestResponseCycle) -> None:
        self._http = http
        self._cycle = cycle
        self._num_left = http.body_bytes_left
        self._block_bytes = MIN_BLOCK_BYTES
        self._block = bytearray()  # empty until it is allocated
        self._num_filled = 0
        self._is_due = False
        self._flush: asyncio.TimerHandle | None = None
        self._replace_protocol(self)

    @property
    def is_over(self) -> bool:
        """True if the app has received the whole body."""
        return not self._num_left and not self._is_due

    async def receive(self) -> ASGIReceiveEvent:
        cycle = self._cycle
        while not (self._is_due or cycle.disconnected or cycle.response_complete):
            cycle.message_event.clear()
            await cycle.message_event.wait()
        cycle.message_event.clear()
        if cycle.disconnected or cycle.response_complete:
            return {"type": "http.disconnect"}
        body = cast(bytes, self._take())  # bytes-like, which is all that the app relies on
        return {"type": "http.request", "body": body, "more_body": self._num_left > 0}

    def _take(self) -> bytearray:
        """Take the filled part of the block; the next bytes start another one."""
        block, num_filled = self._block, self._num_filled
        self._block, self._num_filled, self._is_due = bytearray(), 0, False
        self._cancel_flush()
        if self._num_left:
            self._http.flow.resume_reading()
        if num_filled == len(block):
            self._block_bytes = min(2 * self._block_bytes, MAX_BLOCK_BYTES)
            return block
        if 2 * num_filled < len(block):
            self._block_bytes = max(self._block_bytes // 2, MIN_BLOCK_BYTES)
        return block[:num_filled]

    def _allocate(self) -> bytearray:
        offset = self._http.body_bytes - self._num_left
        return bytearray(min(self._block_bytes - offset % ALIGNMENT, self._num_left))

    def get_buffer(self, sizehint: int) -> memoryview:
        if not self._block:
            self._block = self._allocate()
        if self._cycle.response_complete:
            self._num_filled = 0  # dropped
        return memoryview(self._block)[self._num_filled : self._num_filled + self._num_left]

    def buffer_updated(self, nbytes: int) -> None:
        self._http._unset_keepalive_if_required()  # as uvicorn does for each part of a body
        self._num_filled += nbytes
        self._num_left -= nbytes
        if not self._num_left:
            self._end()
        elif self._cycle.response_complete:
            self._cancel_flush()
        elif self._num_filled == len(self._block):
            self._http.flow.pause_reading()
            self._http.on_reading_paused()
            self._deliver()
        elif self._flush is None:
            self._flush = self._http.loop.call_later(FLUSH_SECONDS, self._deliver)

    def _deliver(self) -> None:
        self._is_due = True
        self._cycle.message_event.set()

    def _end(self) -> None:
        self._cancel_flush()
        self._is_due = True
        self._replace_protocol(self._http)
        self._http.end_body()

    def _replace_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Replace the protocol; uvloop chooses the way of reading when reading starts."""
        self._http.flow.pause_reading()
        self._http.transport.set_protocol(protocol)
        self._http.flow.resume_reading()

    def _cancel_flush(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None

    def eof_received(self) -> None:
        self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_flush()
        self._http.connection_lost(exc)
