"""OpenTelemetry spans as a collector receives them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.fake_engine import FakeEngine
from tests.service.test_rollouts import body, group
from tests.serving import serving

pytestmark = pytest.mark.slow

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
RECORDED = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
NOT_RECORDED = {"traceparent": f"00-{TRACE}-{CALLER}-00"}


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """The collector's address, and the spans received."""
    spans: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                raise AssertionError("compression was not asked for")
            for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces", spans
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def attributes(span: Any) -> dict[str, Any]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes
    }


async def test_requests_and_groups_are_child_spans_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    with collector() as (endpoint, spans):
        async with serving(FakeEngine(), tmp_path, trace={"endpoint": endpoint}) as served:
            asked = body(group(1, 2, 3, n=2), group(4, n=1))
            await served.http.post("/v1/rollouts", json=asked, headers=RECORDED)
            await served.http.post("/v1/rollouts", json=asked, headers=NOT_RECORDED)
            await served.http.post("/v1/rollouts", json=asked)
    assert sorted(span.name for span in spans) == ["POST /v1/rollouts", "group", "group"]
    [request] = [span for span in spans if span.name != "group"]
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, CALLER)
    assert attributes(request)["http.response.status_code"] == 200
    for span in spans:
        if span.name != "group":
            continue
        assert (span.trace_id, span.parent_span_id) == (request.trace_id, request.span_id)
        told = attributes(span)
        assert told["coppice.outcome"] == "done"
        assert told["coppice.completion_tokens"] == 4 * told["coppice.results"]
        assert len(span.events) == told["coppice.results"]
        assert span.start_time_unix_nano <= span.end_time_unix_nano


async def test_trace_starts_here_without_a_parent(tmp_path: Path) -> None:
    with collector() as (endpoint, spans):
        async with serving(FakeEngine(), tmp_path, trace={"endpoint": endpoint}) as served:
            answer = await served.http.get(
                "/v1/rollouts/none", headers={"traceparent": "00-" + "f" * 600}
            )
    [span] = [span for span in spans if span.name == "GET /v1/rollouts/{rollout_id}"]
    assert span.parent_span_id == b""
    assert attributes(span)["coppice.request_id"] == answer.headers["x-request-id"]


async def test_unreachable_collector_affects_nothing(tmp_path: Path) -> None:
    trace = {"endpoint": "http://127.0.0.1:9/v1/traces"}
    async with serving(FakeEngine(), tmp_path, trace=trace) as served:
        answer = await served.http.post("/v1/rollouts", json=body(group(1)))
    assert answer.status_code == 200
