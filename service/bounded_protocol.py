"""HTTP on one client's connection, with the bounds that uvicorn's own protocol does not have.

The head of a request must come whole, in time and not too large, before the app hears of it. What
is written must be taken by the client in time, or the connection is dropped; the app then sees it
closed and ends what it was doing. What is left of a body after its answer is not awaited for ever.
"""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from service.errors import HeadersTooLarge, MalformedRequest, RequestTimeout, ServiceError
from service.problems import problem_response
from service.settings import LimitsSettings

HANDOFF = "coppice.handoff"
"""The extension of the scope that sends the body of an answer which has begun."""

Sender = Callable[[socket.socket], Awaitable[bool]]
"""Sends all of it on a socket that is its own to close, and says whether it could."""
HandOff = Callable[[Sender], Awaitable[None]]


class BoundedProtocol(HttpToolsProtocol):
    """Made by uvicorn, of the class that `bounded_by` returns."""

    limits: LimitsSettings

    _in_head = True
    _head_bytes = 0
    _reading: asyncio.TimerHandle | None = None
    _writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # one byte that is not taken starts the clock
        self._await_more()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._read_in_time()
        self._written_in_time()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head_bytes += len(data)
            self._await_more()
        super().data_received(data)
        if self._in_head and self._head_bytes > self.limits.max_header_bytes:
            self._refuse(HeadersTooLarge(f"at most {self.limits.max_header_bytes} bytes are taken"))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._read_in_time()
        super().on_headers_complete()
        if self.cycle is not None:
            extensions: dict[str, Any] = {HANDOFF: partial(self._hand_off, self.cycle)}
            self.cycle.scope["extensions"] = extensions

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head, self._head_bytes = True, 0
        self._read_in_time()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head:
            self._await_more()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing = self.loop.call_later(self.limits.write_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._written_in_time()

    def send_400_response(self, msg: str) -> None:
        self._refuse(MalformedRequest("this is not HTTP that the server can read"))

    async def _hand_off(self, cycle: RequestResponseCycle, send: Sender) -> None:
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

    def _await_more(self) -> None:
        if self._reading is None:
            self._reading = self.loop.call_later(self.limits.read_seconds, self._too_slow)

    def _read_in_time(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _written_in_time(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _too_slow(self) -> None:
        """Who has sent nothing of a request is told nothing."""
        if self._in_head and self._head_bytes:
            self._refuse(RequestTimeout("the head did not come in time"))
        else:
            self.transport.abort()

    def _refuse(self, error: ServiceError) -> None:
        if self._is_answering():
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.write(_raw(error))
            self.transport.close()

    def _is_answering(self) -> bool:
        """Whether what would be said now would be taken for another request's answer."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        return self._in_head or self.cycle.response_started


def bounded_by(limits: LimitsSettings) -> type[BoundedProtocol]:
    return type("Bounded", (BoundedProtocol,), {"limits": limits})


def _raw(error: ServiceError) -> bytes:
    response = problem_response(error.problem(), headers={"Connection": "close"})
    status = HTTPStatus(response.status_code)
    head = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
    head += [name + b": " + value for name, value in response.raw_headers]
    return b"\r\n".join([*head, b"", bytes(response.body)])
