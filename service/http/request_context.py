"""ASGI middleware for request ids, metrics, traces and the audit log.

A plain ASGI class: Starlette's BaseHTTPMiddleware would buffer streams and hide disconnects.
"""

import time
import uuid

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.auth.audit_log import log_admin_call
from service.observability.logs import request_id
from service.observability.metrics import Metrics
from service.observability.tracing import Tracing


class RequestContextMiddleware:
    """Outermost middleware except for Starlette's ServerErrorMiddleware."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, traces: Tracing) -> None:
        self._app = app
        self._metrics = metrics
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        new_request_id = uuid.uuid4().hex
        scope["coppice.request_id"] = new_request_id
        request_id.set(new_request_id)
        status = 500
        began = time.monotonic()

        async def send_with_request_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", new_request_id.encode()),
                ]
            await send(message)

        with self._traces.request(scope) as span:
            try:
                await self._app(scope, receive, send_with_request_id)
            finally:
                # The route's pattern, because the path itself has unbounded cardinality.
                route = getattr(scope.get("route"), "path", "none")
                self._count(route, status, time.monotonic() - began)
                self._traces.end_request(span, scope, route, status)
                log_admin_call(scope, status)

    def _count(self, route: str, status: int, seconds: float) -> None:
        self._metrics.requests.labels(route, str(status)).inc()
        self._metrics.request_seconds.labels(route).observe(seconds)
