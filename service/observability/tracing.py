"""OpenTelemetry spans of requests and groups, exported over OTLP.

The parent of a request's span is the caller's traceparent, if there is one. Spans hold counts,
weights versions and ids that the server generated, never prompts, tokens or names that a caller
chose. Without an endpoint only OpenTelemetry's API is imported, and no spans are created.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import INVALID_SPAN, NoOpTracer, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import Scope

from coppice.wire.rollouts import GroupAnswer
from service import __version__
from service.config.settings import TraceSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

HEADERS = (b"traceparent", b"tracestate")
MAX_HEADER_BYTES = 512
EXPORT_SECONDS = 5
MAX_SAMPLES = 100  # exported as events of a group's span


class Tracing:
    """OpenTelemetry tracer of the service; `close` sends the remaining spans."""

    def __init__(self, settings: TraceSettings) -> None:
        self._provider = None if settings.endpoint is None else _provider(settings)
        self._tracer = self._provider.get_tracer("coppice") if self._provider else NoOpTracer()
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def request(self, scope: Scope) -> Iterator[Span]:
        if self._provider is None:
            yield INVALID_SPAN
            return
        parent = self._propagator.extract(_carrier(scope))
        with self._tracer.start_as_current_span(
            scope["method"], context=parent, kind=SpanKind.SERVER
        ) as span:
            yield span

    def end_request(self, span: Span, scope: Scope, route: str, status: int) -> None:
        if not span.is_recording():
            return
        span.update_name(f"{scope['method']} {route}")
        span.set_attributes(
            {
                "http.request.method": scope["method"],
                "http.route": route,
                "http.response.status_code": status,
                "coppice.request_id": scope["coppice.request_id"],
            }
        )
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))

    def group(
        self, rollout_id: str, group: GroupAnswer, began_at: float, sample_seconds: Sequence[float]
    ) -> None:
        """Record the trace span of a finished group; call it in the context of the HTTP request."""
        if self._provider is None:
            return
        began = time.time_ns() - _nanoseconds(asyncio.get_running_loop().time() - began_at)
        parts = group.segments or group.samples
        span = self._tracer.start_span("group", start_time=began)
        span.set_attributes(
            {
                "coppice.rollout_id": rollout_id,
                "coppice.group": group.index,
                "coppice.outcome": group.outcome,
                "coppice.prompt_tokens": group.num_prompt_tokens,
                "coppice.prompt_tokens_cached": group.num_cached_tokens,
                "coppice.completion_tokens": group.num_generated_tokens,
                "coppice.results": len(group.samples),
                "coppice.versions": sorted({v.version for part in parts for v in part.versions}),
            }
        )
        for seconds in sample_seconds[-MAX_SAMPLES:]:
            span.add_event("sample ended", timestamp=began + _nanoseconds(seconds))
        span.end(began + _nanoseconds(max(sample_seconds, default=0.0)))

    def close(self) -> None:
        """Send the remaining trace spans and stop the exporter; may block for a few seconds."""
        if self._provider is not None:
            self._provider.shutdown()


def _provider(settings: TraceSettings) -> "TracerProvider":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(
        resource=Resource({"service.name": "coppice", "service.version": __version__}),
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(endpoint=settings.endpoint, timeout=EXPORT_SECONDS)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _carrier(scope: Scope) -> dict[str, str]:
    return {
        name.decode(): value.decode("latin-1")
        for name, value in scope["headers"]
        if name in HEADERS and len(value) <= MAX_HEADER_BYTES
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
