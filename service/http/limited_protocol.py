"""Subclass of uvicorn's HTTP protocol with limits on header sizes, timeouts and pipelining.

uvicorn limits neither the size of heads, trailers and chunk extensions nor the time to send a head
or the rest of a body, or to read a response. It takes trailer fields for headers, parses the body
of a request with Upgrade as a request, and sends chunks to HTTP/1.0 clients.
"""

import asyncio
from types import SimpleNamespace

import httptools
from uvicorn._types import ASGI3Application, ASGISendEvent, Scope
from uvicorn._types import ASGIReceiveCallable as Receive
from uvicorn._types import ASGISendCallable as Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from service.config.limits import LimitsSettings
from service.errors import HeadersTooLarge, MalformedRequest, RequestTimeout, ServiceError
from service.http.exception_handlers import problem_response

CROWDED = "coppice.crowded"
"""ASGI extension that marks requests past uvicorn's `limit_concurrency`."""
CHUNK_LINE_BYTES = 32
"""Framing bytes allowed per chunk of a chunked body: its size field and two line ends."""
MAX_HEADER_BYTES = 64 * 2**10
"""Limit of a request's URL and headers, and of chunk extensions and trailers.

It is above the limits of common proxies, so that none needs more.
"""
MAX_URL_BYTES = 2**16 - 1  # httptools refuses a longer URL like a malformed one
MAX_PIPELINED_REQUESTS = 64


class LimitedProtocol(HttpToolsProtocol):
    """HTTP protocol of one connection. `protocol_with_limits` returns the class of a port."""

    limits: LimitsSettings
    url = b""
    _is_reading_head = True
    _overhead_bytes = 0  # of the head, then of the body without its content and chunk lines
    _timer: asyncio.TimerHandle | None = None  # of a head, or of a body after its response
    _write_timer: asyncio.TimerHandle | None = None
    _cycle: RequestResponseCycle | None = None  # the request that runs
    _is_discarding = False  # what arrives behind the last request that is answered

    @property
    def _is_running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # the first unsent byte starts the write timer
        self._start_timer()
        if self.limit_concurrency and len(self.connections) >= self.limit_concurrency:
            self._close_an_idle_one()

    def _close_an_idle_one(self) -> None:
        for one in self.connections:
            if isinstance(one, LimitedProtocol) and one is not self and not one._is_running:
                self.connections.discard(one)
                return one.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._cycle is not None:  # uvicorn notifies the last of pipelined requests only
            self._cycle.disconnected = True
            self._cycle.message_event.set()
        self._stop_timer()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._overhead_bytes += len(data)
        if self._is_discarding:
            if self._overhead_bytes > self.limits.max_body_bytes:
                self.transport.abort()
            return
        if self._is_reading_head and not self._is_running:
            self._start_timer()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            return None if self._is_discarding else self.send_400_response("")
        self._overhead_bytes = max(0, self._overhead_bytes)
        if self._overhead_bytes > MAX_HEADER_BYTES:
            what = "the headers" if self._is_reading_head else "chunk extensions and trailers"
            self._send_error(HeadersTooLarge(f"the limit of {what} is {MAX_HEADER_BYTES} bytes"))

    def _parse(self, data: bytes) -> None:
        """Feed the parser, without the header Upgrade, which a server may ignore (RFC 9110, 7.8).

        With it the parser assumes that the request has no body.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if method == b"CONNECT":
                raise httptools.HttpParserError("CONNECT is not supported") from None
            head = [method + b" " + self.url + b" HTTP/" + version]
            head += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            self.parser.feed_data(b"\r\n".join([*head, b"", b""]))
            self._parse(data[upgrade.args[0] :])

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_reading_head:  # a trailer must not become a header (RFC 9110, 6.5.1)
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_parse` parses this head again
        if len(self.pipeline) >= MAX_PIPELINED_REQUESTS:
            raise httptools.HttpParserError("too many pipelined requests")
        super().on_headers_complete()
        self._is_reading_head, self._overhead_bytes = False, 0
        self._stop_timer()
        self.flow.resume_reading()  # a disconnect is detected behind pipelined requests, too

    def on_chunk_header(self) -> None:
        self._overhead_bytes -= CHUNK_LINE_BYTES

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes -= len(body)
        is_large = len(self.cycle.body) + len(body) > HIGH_WATER_LIMIT
        if is_large and self.pipeline and self._cycle is not None and not _is_sent(self._cycle):
            self._discard_from_here(self._cycle)
        super().on_body(body)

    def _discard_from_here(self, running: RequestResponseCycle) -> None:
        """Answer the requests before the one that arrives, and close then (RFC 9112, 9.6).

        uvicorn would stop reading, and a disconnect of the running request go unnoticed.
        """
        self.pipeline.popleft()
        self.cycle = self.pipeline[0][0] if self.pipeline else running
        self.cycle.keep_alive, self._is_discarding = False, True
        self.cycle.transport = SimpleNamespace(  # type: ignore[assignment]
            write=self.transport.write, close=self._close_writing
        )
        raise httptools.HttpParserError("the body of a pipelined request is too large")

    def _close_writing(self) -> None:
        """Close in stages (RFC 9112, 9.6): bytes that arrive after a close reset the connection.

        The client would lose what it has not read of the response.
        """
        if not self.transport.is_closing():
            self.transport.write_eof()
            self._start_timer()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._is_reading_head, self._overhead_bytes = True, 0
            self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_running and (self._overhead_bytes or not self._is_reading_head):
            self._start_timer()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        if app is not self.app:  # uvicorn's 503, for which the app has a problem document
            cycle.scope["extensions"], cycle.keep_alive = {CROWDED: {}}, False
        self._cycle = cycle
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _without_chunks(cycle, self.app) if is_old else self.app)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _start_timer(self) -> None:
        self._timer = self._timer or self.loop.call_later(self.limits.read_seconds, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _on_timer(self) -> None:
        if self._is_reading_head and self._overhead_bytes:
            self._send_error(RequestTimeout("the headers did not arrive in time"))
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        if len(self.url) > MAX_URL_BYTES:
            self._send_error(HeadersTooLarge(f"the limit of a URL is {MAX_URL_BYTES} bytes"))
        else:
            self._send_error(MalformedRequest("the request could not be parsed as HTTP/1.1"))

    def _send_error(self, error: ServiceError) -> None:
        """Send an error and close; only close if it would be taken for a part of a response."""
        if self.pipeline or (self._is_running and self._is_reading_head):
            return self.transport.abort()
        if not self._is_reading_head and self.cycle.response_started:
            return self.transport.abort()
        if not self.transport.is_closing():
            response = problem_response(error.problem(), headers={"Connection": "close"})
            head = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
            content = [STATUS_LINE[response.status_code], *head, b"\r\n", response.body]
            self.transport.write(b"".join(content))
            self.transport.close()


def _is_sent(cycle: RequestResponseCycle) -> bool:
    """True if the client has the whole response, and may send its next request.

    The app has yet to end the response, and nothing that it does depends on the client any more.
    """
    is_sized = cycle.response_started and cycle.chunked_encoding is False
    return is_sized and cycle.expected_content_length == 0


def _without_chunks(cycle: RequestResponseCycle, app: ASGI3Application) -> ASGI3Application:
    """App whose response ends with the connection: HTTP/1.0 has no chunks (RFC 9112, 6.1)."""

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: ASGISendEvent) -> None:
            body = message.get("body", b"")
            cycle.chunked_encoding, cycle.expected_content_length = False, len(body)  # type: ignore
            await send(message)

        await app(scope, receive, send_plain)

    return run


def protocol_with_limits(limits: LimitsSettings) -> type[LimitedProtocol]:
    return type("Limited", (LimitedProtocol,), {"limits": limits})
