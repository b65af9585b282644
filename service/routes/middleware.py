"""ASGI middleware: id, metrics, trace and audit log of each request, and limits on it.

Plain ASGI classes: Starlette's BaseHTTPMiddleware would buffer streams and hide disconnects.

Limits that apply before a request reaches the app, and clients that do not read their response, are
handled by the connection's protocol (service/http/limited_protocol.py).
"""

import asyncio
import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.auth.audit_log import log_admin_call
from service.config.limits import LimitsSettings
from service.errors import HeadersTooLarge, Overloaded, RequestTimeout
from service.http.exception_handlers import error_response
from service.http.limited_protocol import CROWDED, MAX_HEADER_BYTES
from service.log_context import request_id
from service.observability.metrics import Metrics
from service.observability.tracing import Tracing

BLOCK_BYTES = 16 * 2**10
PROBES = ("/livez", "/readyz", "/startupz", "/health")
CROWDED_RETRY_SECONDS = 5.0
PIECE_BYTES = 256 * 2**10


class RequestContextMiddleware:
    """Middleware that gives each request an id, metrics, a trace span and an audit record.

    The outermost middleware except for Starlette's own.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, traces: Tracing) -> None:
        self._app = app
        self._metrics = metrics
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope["coppice.request_id"] = uuid.uuid4().hex
        request_id.set(scope["coppice.request_id"])
        response = _TrackedResponse(send, scope["coppice.request_id"])
        began = time.monotonic()
        with self._traces.request(scope) as span:
            try:
                await self._app(scope, receive, response.send)
            finally:
                # The route's pattern, because the path itself has unbounded cardinality.
                route = getattr(scope.get("route"), "path", "none")
                self._count(route, response.status, time.monotonic() - began)
                self._traces.end_request(span, scope, route, response.status)
                log_admin_call(scope, response.status)

    def _count(self, route: str, status: int, seconds: float) -> None:
        self._metrics.http.requests.labels(route, str(status)).inc()
        self._metrics.http.request_seconds.labels(route).observe(seconds)


class _TrackedResponse:
    """Wraps ASGI `send`: adds the request id to the response headers, records the status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._header = (b"x-request-id", request_id.encode())
        self.status = 500

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message["headers"], self._header]
        await self._send(message)


class LimitsMiddleware:
    """Middleware that limits header sizes, connections and the time to receive a body.

    Runs inside RequestContextMiddleware, so that refused requests have an id and are counted.
    """

    def __init__(self, app: ASGIApp, *, limits: LimitsSettings) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if head_bytes(scope) > MAX_HEADER_BYTES:
            too_large = HeadersTooLarge(f"the limit is {MAX_HEADER_BYTES} bytes")
            return await error_response(scope, too_large)(scope, receive, send)
        if CROWDED in scope.get("extensions", {}) and scope["path"] not in PROBES:
            error = Overloaded(
                "the limit of open connections is reached (limits.max_connections)",
                retry_after_seconds=CROWDED_RETRY_SECONDS,
            )
            return await error_response(scope, error)(scope, receive, send)
        body = _TimedBody(receive, self._limits.read_seconds)
        await self._app(scope, body.receive, _split_large_bodies(send))


def head_bytes(scope: Scope) -> int:
    """Size in bytes of a request's URL and headers as received, without separators."""
    header_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    return header_bytes + len(scope.get("raw_path", b"")) + len(scope["query_string"])


class _TimedBody:
    """Request body with a timeout for each `BLOCK_BYTES` received, whatever the chunk sizes.

    A timeout per chunk would let a client send single bytes forever.
    """

    def __init__(self, receive: Receive, seconds: float) -> None:
        self._receive = receive
        self._seconds = seconds
        self._has_more = True
        self._block_bytes = 0
        self._deadline: float | None = None

    async def receive(self) -> Message:
        """Receive the next ASGI message within the deadline of the body's current block.

        After the end of the body the only message is the disconnect, which has no timeout.
        """
        if not self._has_more:
            return await self._receive()
        self._deadline = self._deadline or asyncio.get_running_loop().time() + self._seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise RequestTimeout(
                f"less than {BLOCK_BYTES} bytes of the body arrived in {self._seconds:g} s"
            ) from None
        self._count(message)
        return message

    def _count(self, message: Message) -> None:
        self._has_more = message.get("more_body", False)
        self._block_bytes += len(message.get("body", b""))
        if self._block_bytes >= BLOCK_BYTES:
            self._block_bytes, self._deadline = 0, None


def _split_large_bodies(send: Send) -> Send:
    """Wrap ASGI `send` so that large response bodies are sent in parts of `PIECE_BYTES`.

    A large response is then never in the write buffer as a whole, and the write timeout applies to
    each part instead of the whole response.
    """

    async def send_in_pieces(message: Message) -> None:
        body = message.get("body", b"")
        if len(body) <= PIECE_BYTES:
            return await send(message)
        view = memoryview(body)  # slices of bytes would be copies
        for start in range(0, len(body), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            more = start + PIECE_BYTES < len(body) or message.get("more_body", False)
            await send({"type": message["type"], "body": piece, "more_body": more})

    return send_in_pieces
