"""HTTP on one client's connection, with the bounds that uvicorn's own protocol does not have.

The head of a request must come whole, in time and not too large, before the app hears of it. What
is written must be taken by the client in time, or the connection is dropped; the app then sees it
closed and ends what it was doing. What is left of a body after its answer is not awaited for ever.
Trailer fields are dropped, requests to upgrade are served as HTTP/1.1, and a client that closes its
connection is noticed while reading is paused.
"""

import asyncio
import os
import select
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.config.settings import LimitsSettings
from service.http.connections import Connections, connection_limit
from service.http.errors import HeadersTooLarge, MalformedRequest, RequestTimeout, ServiceError
from service.http.exception_handlers import problem_response

SEND_BODY_EXTENSION = "coppice.handoff"
"""The extension of the scope that sends the body of an answer which has begun."""

CROWDED = "coppice.crowded"
"""The extension of the scope of a request on a connection past the limit."""

CROWDED_SECONDS = 1.0
"""Time that such a connection has for the head of its request."""

CHUNK_LINE_BYTES = 32
"""Bytes of framing that each chunk of a body may have: its size, and the ends of two lines."""

MAX_PIPELINED_REQUESTS = 64
"""Requests on one connection that wait for the response to an earlier one."""

HANGUP_SECONDS = 0.3
"""Interval of the checks for a closed connection while reading is paused."""

SendBody = Callable[[socket.socket], Awaitable[bool]]
"""Sends all of it on a socket that is its own to close, and says whether it could."""
SendBodyExtension = Callable[[SendBody], Awaitable[None]]


class TimeoutProtocol(HttpToolsProtocol):
    """Made by uvicorn, of the class that `protocol_with_limits` returns."""

    limits: LimitsSettings
    pool: Connections

    _crowded = False
    _is_reading_head = True
    _head_bytes = 0
    _framing_bytes = 0
    _running: RequestResponseCycle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _hangup: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # one byte that is not taken starts the clock
        self._crowded = not self.pool.add(self)
        if self._crowded and not self.pool.has_reserve:
            return transport.abort()
        self._start_read_timer()

    def close(self) -> None:
        """To make room for another connection."""
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.pool.remove(self)
        self._disconnect_running()
        self._cancel_read_timer()
        self._cancel_write_timer()
        if self._hangup is not None:
            self._hangup.cancel()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._is_reading_head:
            self._head_bytes += len(data)
            self._start_read_timer()
        self._framing_bytes += len(data)
        self._parse(data)
        self._check_sizes()
        self._watch_hangup()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Trailer fields are dropped: they are never merged into the headers (RFC 9110, 6.5.1)."""
        if self._is_reading_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # parsed again, by `_feed`
        if len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            raise httptools.HttpParserError("too many pipelined requests")
        self._is_reading_head, self._framing_bytes = False, 0
        self._cancel_read_timer()
        super().on_headers_complete()
        if self.cycle is not None:
            extensions: dict[str, Any] = {SEND_BODY_EXTENSION: partial(self._hand_off, self.cycle)}
            if self._crowded:
                extensions[CROWDED] = True
                self.cycle.keep_alive = False
            self.cycle.scope["extensions"] = extensions

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body)
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._framing_bytes -= CHUNK_LINE_BYTES

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._is_reading_head, self._head_bytes = True, 0
        self._cancel_read_timer()

    def on_response_complete(self) -> None:
        self.pool.wait(self)
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()
            self._watch_hangup()
        elif not self._is_reading_head and self.cycle.response_complete:
            self._start_read_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_write_timer()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        self.pool.serve(self)
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        self._send_error(MalformedRequest("this is not HTTP that the server can read"))

    async def _hand_off(self, cycle: RequestResponseCycle, send: SendBody) -> None:
        """Past the transport, whose buffer must be empty then and which writes nothing meanwhile.

        What cannot be sent breaks the connection: the answer's length has been announced.
        """
        transport = self.transport
        while transport.get_write_buffer_size() and not transport.is_closing():
            await self.flow.drain()
            await asyncio.sleep(0)
        if transport.is_closing():
            return
        connection = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        if await send(connection):
            cycle.expected_content_length = 0
        else:
            transport.abort()
            cycle.disconnected = True

    def _parse(self, data: bytes) -> None:
        rest: memoryview | None = memoryview(data)
        try:
            while rest is not None:
                rest = self._feed(rest)
        except httptools.HttpParserError:
            self.send_400_response("")

    def _feed(self, data: memoryview) -> memoryview | None:
        """The bytes after the head of a request to upgrade, which is parsed again without Upgrade.

        The parser takes such a request to have no body, and its body for the next request. A
        server may ignore Upgrade (RFC 9110, 7.8).
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self.parser.feed_data(head)
            return data[upgrade.args[0] :]
        return None

    def _head_without_upgrade(self) -> bytes:
        method = self.parser.get_method()
        if method == b"CONNECT":
            raise httptools.HttpParserError("CONNECT is not supported")
        version = self.parser.get_http_version().encode()
        lines = [method + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _check_sizes(self) -> None:
        """Framing is what of a body's bytes is neither its content nor a chunk's plain size."""
        limit = self.limits.max_header_bytes
        self._framing_bytes = max(0, self._framing_bytes)
        if self._is_reading_head and self._head_bytes > limit:
            self._send_error(HeadersTooLarge(f"at most {limit} bytes are taken"))
        elif not self._is_reading_head and self._framing_bytes > limit:
            self._send_error(
                HeadersTooLarge(f"at most {limit} bytes of chunk extensions and trailers are taken")
            )

    def _watch_hangup(self) -> None:
        """While reading is paused the event loop does not report the end of the connection."""
        if self.flow.read_paused and self._hangup is None and not self.transport.is_closing():
            self._hangup = self.loop.call_later(HANGUP_SECONDS, self._check_hangup)

    def _check_hangup(self) -> None:
        self._hangup = None
        if self.flow.read_paused and _has_hung_up(self.transport.get_extra_info("socket")):
            self.transport.abort()
        self._watch_hangup()

    def _disconnect_running(self) -> None:
        """uvicorn tells only the latest request of the connection."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _start_read_timer(self) -> None:
        if self._read_timer is None:
            seconds = self.limits.read_seconds
            seconds = min(seconds, CROWDED_SECONDS) if self._crowded else seconds
            self._read_timer = self.loop.call_later(seconds, self._on_read_timeout)

    def _cancel_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _cancel_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _on_read_timeout(self) -> None:
        """Who has sent nothing of a request is told nothing."""
        self._read_timer = None
        if self.flow.read_paused:
            self._start_read_timer()
        elif self._is_reading_head and self._head_bytes:
            self._send_error(RequestTimeout("the head did not come in time"))
        else:
            self.transport.abort()

    def _send_error(self, error: ServiceError) -> None:
        if self._is_answering():
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.write(_raw_response(error))
            self.transport.close()

    def _is_answering(self) -> bool:
        """Whether what would be said now would be taken for another request's answer."""
        if self.cycle is None:
            return False
        if self.pipeline:
            return True
        return (
            not self.cycle.response_complete
            if self._is_reading_head
            else self.cycle.response_started
        )


def protocol_with_limits(
    limits: LimitsSettings, pool: Connections | None = None
) -> type[TimeoutProtocol]:
    """`pool`: of the port; a port without one counts by itself."""
    pool = pool or Connections(connection_limit(limits.max_connections))
    return type("Bounded", (TimeoutProtocol,), {"limits": limits, "pool": pool})


def _raw_response(error: ServiceError) -> bytes:
    response = problem_response(error.problem(), headers={"Connection": "close"})
    status = HTTPStatus(response.status_code)
    head = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
    head += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*head, b"", bytes(response.body)])


def _has_hung_up(connection: socket.socket) -> bool:
    """Whatever has not been read yet; Linux reports POLLHUP and POLLERR unasked."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
