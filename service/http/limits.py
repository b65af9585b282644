"""The edges of every request: how large its head may be, how slowly its body may come, and in what
pieces its answer leaves.

A plain ASGI wrapper, like the request's scope. What comes before a request reaches the app, and
readers that do not read, are the connection's business (service/http/protocol.py).
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.config.settings import LimitsSettings
from service.http.errors import HeadersTooLarge, Overloaded, RequestTimeout
from service.http.exception_handlers import error_response
from service.http.protocol import CROWDED

BLOCK_BYTES = 16 * 2**10
PROBES = ("/livez", "/readyz", "/startupz", "/health")
CROWDED_RETRY_SECONDS = 5.0
PIECE_BYTES = 256 * 2**10


class LimitsMiddleware:
    """Inside the request's scope, so that what is refused here has an id and is counted."""

    def __init__(self, app: ASGIApp, *, limits: LimitsSettings) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if head_bytes(scope) > self._limits.max_header_bytes:
            too_large = HeadersTooLarge(f"at most {self._limits.max_header_bytes} bytes are taken")
            return await error_response(scope, too_large)(scope, receive, send)
        if CROWDED in scope.get("extensions", {}) and scope["path"] not in PROBES:
            error = Overloaded(
                "the server has as many connections as limits.max_connections allows",
                retry_after_seconds=CROWDED_RETRY_SECONDS,
            )
            return await error_response(scope, error)(scope, receive, send)
        body = _TimedBody(receive, self._limits.read_seconds)
        await self._app(scope, body.receive, _split_large_bodies(send))


def head_bytes(scope: Scope) -> int:
    """As they came, but for the separators."""
    header_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    return header_bytes + len(scope.get("raw_path", b"")) + len(scope["query_string"])


class _TimedBody:
    """Every block of the body has the same time to come, whatever number of chunks it comes in.

    A time for each chunk alone would let a caller send a byte at a time for ever.
    """

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive = receive
        self._seconds = seconds
        self._has_more = True
        self._block_bytes = 0
        self._deadline: float | None = None

    async def receive(self) -> Message:
        """After the end of the body only the disconnect is awaited, as long as it takes."""
        if not self._has_more:
            return await self._receive()
        self._deadline = self._deadline or asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise RequestTimeout(f"no {BLOCK_BYTES} bytes in {self._seconds:g} s") from None
        self._count(message)
        return message

    def _count(self, message: Message) -> None:
        self._has_more = message.get("more_body", False)
        self._block_bytes += len(message.get("body", b""))
        if self._block_bytes >= BLOCK_BYTES:
            self._block_bytes, self._deadline = 0, None


def _split_large_bodies(send: Send) -> Send:
    """So that a large answer is never in the socket's buffer as a whole, and a reader is given time
    for each piece rather than for all of it."""

    async def send_in_pieces(message: Message) -> None:
        body = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            return await send(message)
        view = memoryview(body)  # slices of bytes would copy what is left once a piece
        for start in range(0, len(body), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            more = start + PIECE_BYTES < len(body) or message.get("more_body", False)
            await send({"type": message["type"], "body": piece, "more_body": more})

    return send_in_pieces
