"""uvicorn's HTTP protocol with the timeouts and limits that it lacks.

- The head of a request must arrive completely, in time and within its size limit before the app is
  called.
- The client must read written data in time. Otherwise the connection is dropped, and the app gets a
  disconnect and cancels its work.
- The rest of a request's body has a timeout once the response is complete.
- Trailer fields are dropped.
- Requests with Upgrade are served as HTTP/1.1.
- A client that closes its connection is detected even while reading is paused.
- Large bodies are received in blocks (`service/http/body_blocks.py`).

The module is longer than others: uvicorn creates one object of one class per connection, and all of
its callbacks share the state of that connection.
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
from uvicorn._types import ASGI3Application, ASGISendEvent, Scope
from uvicorn._types import ASGIReceiveCallable as Receive
from uvicorn._types import ASGISendCallable as Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from service.config.settings import LimitsSettings
from service.http.body_blocks import BlockProtocol
from service.http.connection_limit import Connections, connection_limit
from service.http.errors import HeadersTooLarge, MalformedRequest, RequestTimeout, ServiceError
from service.http.exception_handlers import problem_response

SEND_BODY_EXTENSION = "coppice.handoff"
"""ASGI extension that sends the body of a response directly on the socket.

It is called after the response has started.
"""
CROWDED = "coppice.crowded"
"""ASGI extension that marks requests on a connection past the connection limit."""
CROWDED_SECONDS = 1.0
"""Timeout of a request's head on a connection past the limit, in seconds."""
CHUNK_LINE_BYTES = 32
"""Framing bytes allowed per chunk of a chunked body: its size field and two line ends."""
MAX_URL_BYTES = 2**16 - 1
"""Limit of httptools, which refuses a longer URL like a malformed one."""
MAX_PIPELINED_REQUESTS = 64
"""Limit of pipelined requests: those that wait for the response to an earlier one."""
HANGUP_SECONDS = 0.3
"""Interval of the checks for a closed connection while reading is paused, in seconds."""
SendBody = Callable[[socket.socket], Awaitable[bool]]
"""Sends the whole body on the socket, which it owns and closes; returns False on failure."""
SendBodyExtension = Callable[[SendBody], Awaitable[None]]


class TimeoutProtocol(BlockProtocol):
    """uvicorn's HTTP protocol of a connection, with timeouts and size limits.

    uvicorn instantiates the subclass that `protocol_with_limits` returns, one object per
    connection.
    """

    limits: LimitsSettings
    pool: Connections
    url = b""

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
        transport.set_write_buffer_limits(high=0)  # the first unsent byte starts the write timer
        self._crowded = not self.pool.add(self)
        if self._crowded and not self.pool.has_reserve:
            return transport.abort()
        self._start_read_timer()

    def close(self) -> None:
        """Close this idle connection to make room for a new one at the connection limit."""
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
        """Handle a header field; drop a trailer field.

        Trailer fields must not be merged into the headers (RFC 9110, 6.5.1).
        """
        if self._is_reading_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_feed` parses this request again
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

    def on_reading_paused(self) -> None:
        self._watch_hangup()

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
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(cycle, app)
        super()._start_asgi_task(cycle, app)

    def send_400_response(self, msg: str) -> None:
        if len(self.url) > MAX_URL_BYTES:
            self._send_error(HeadersTooLarge(f"the limit of a URL is {MAX_URL_BYTES} bytes"))
        else:
            self._send_error(MalformedRequest("the request could not be parsed as HTTP/1.1"))

    async def _hand_off(self, cycle: RequestResponseCycle, send: SendBody) -> None:
        """Let `send` write a response body directly to the socket, bypassing the transport.

        The transport's write buffer must be empty, and the transport writes nothing meanwhile. If
        the body cannot be sent completely, the connection is aborted, because Content-Length has
        been sent already.
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
        """Feed the HTTP parser; returns the bytes left after a request with Upgrade, else None.

        The parser assumes that a request with Upgrade has no body, and would parse its body as the
        next request. Therefore its head is parsed again without the Upgrade header. A server may
        ignore Upgrade (RFC 9110, 7.8).
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            head = self._head_without_upgrade()
            self.new_parser()
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
        """Send an error if a request's headers, or the chunk framing of its body, are too large.

        Framing bytes are the body's bytes without its content, less `CHUNK_LINE_BYTES` per chunk:
        chunk extensions and trailers.
        """
        limit = self.limits.max_header_bytes
        self._framing_bytes = max(0, self._framing_bytes)
        if self._is_reading_head and self._head_bytes > limit:
            self._send_error(HeadersTooLarge(f"the limit is {limit} bytes"))
        elif not self._is_reading_head and self._framing_bytes > limit:
            self._send_error(
                HeadersTooLarge(f"the limit of chunk extensions and trailers is {limit} bytes")
            )

    def _watch_hangup(self) -> None:
        """Poll for a closed connection while reading is paused.

        The event loop does not report the end of the connection then.
        """
        if self.flow.read_paused and self._hangup is None and not self.transport.is_closing():
            self._hangup = self.loop.call_later(HANGUP_SECONDS, self._check_hangup)

    def _check_hangup(self) -> None:
        self._hangup = None
        if self.flow.read_paused and _has_hung_up(self.transport.get_extra_info("socket")):
            self.transport.abort()
        self._watch_hangup()

    def _disconnect_running(self) -> None:
        """Signal the client's disconnect to the app that serves the running request.

        uvicorn signals it only to the latest request of the connection.
        """
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
        """Handle a read timeout: send an error if a part of the headers arrived, otherwise abort.

        While reading is paused the timer is restarted.
        """
        self._read_timer = None
        if self.flow.read_paused:
            self._start_read_timer()
        elif self._is_reading_head and self._head_bytes:
            self._send_error(RequestTimeout("the headers did not arrive in time"))
        else:
            self.transport.abort()

    def _send_error(self, error: ServiceError) -> None:
        if self._is_answering():
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.write(_raw_response(error))
            self.transport.close()

    def _is_answering(self) -> bool:
        """True if an error sent now would be taken for a part of another response."""
        if self.cycle is None:
            return False
        if self.pipeline:
            return True
        return (
            not self.cycle.response_complete
            if self._is_reading_head
            else self.cycle.response_started
        )


def _without_chunks(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """An app whose responses of unknown length end with the connection, not with a last chunk.

    HTTP/1.0 has no chunks (RFC 9112, 6.1); uvicorn sends them all the same.
    """

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plain(message: ASGISendEvent) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = b"content-length" in dict(message.get("headers", ()))
                cycle.chunked_encoding = None if has_length else False
            elif message["type"] == "http.response.body" and not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return run


def protocol_with_limits(
    limits: LimitsSettings, pool: Connections | None = None
) -> type[TimeoutProtocol]:
    """Create the HTTP protocol class of a port, with its limits and its open connections.

    `pool`: the open connections of the port; created here if None.
    """
    pool = pool or Connections(connection_limit(limits.max_connections))
    return type("Bounded", (TimeoutProtocol,), {"limits": limits, "pool": pool})


def _raw_response(error: ServiceError) -> bytes:
    response = problem_response(error.problem(), headers={"Connection": "close"})
    status = HTTPStatus(response.status_code)
    head = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
    head += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*head, b"", bytes(response.body)])


def _has_hung_up(connection: socket.socket) -> bool:
    """True if the client has closed the connection, even if unread data is left.

    Linux reports POLLHUP and POLLERR without being requested.
    """
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))
