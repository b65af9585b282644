"""Validation of every answer that a test receives against openapi.yaml.

An undocumented status, media type or header is an error, as is a body that does not match its
schema. Requests without an operation must be refused.
"""

import json
from collections.abc import AsyncIterator
from functools import cache

import httpx
import jsonschema_rs

from coppice.wire.packed.requests import PACKED_MEDIA_TYPE
from coppice.wire.packed.results import unpack
from coppice.wire.packed.scores import unpack_scores
from tests.contract.document import Node, operations, schemas

NDJSON = "application/x-ndjson"
BINARY = "application/octet-stream"
JSON = ("application/json", "application/problem+json")
# Headers of HTTP itself.
OF_HTTP = {"allow", "connection", "content-length", "content-type", "date", "transfer-encoding"}


class Recorded(httpx.AsyncBaseTransport):
    """Raises AssertionError at the head of an answer, or at the end of its body."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._inner.handle_async_request(request)
        expected = checked_head(request.method, request.url.path, response)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        if request.method != "HEAD":
            response.stream = _Body(response.stream, _media_type(response), expected)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Body(httpx.AsyncByteStream):
    def __init__(self, inner: httpx.AsyncByteStream, media_type: str, expected: Node) -> None:
        self._inner = inner
        self._media_type = media_type
        self._expected = expected

    async def __aiter__(self) -> AsyncIterator[bytes]:
        chunks = []
        async for chunk in self._inner:
            chunks.append(chunk)
            yield chunk
        check_body(self._media_type, self._expected, b"".join(chunks))

    async def aclose(self) -> None:
        await self._inner.aclose()


def checked_head(method: str, path: str, response: httpx.Response) -> Node:
    """The contract's declaration of this answer."""
    operation = next((o for o in operations() if o.method == method and o.matches(path)), None)
    if operation is None:
        return _checked_refusal(path, response)
    status = str(response.status_code)
    told = f"{method} {operation.path} answers {status}"
    assert status in operation.responses, f"{told}, which is not in the contract"
    expected = operation.responses[status]
    assert _media_type(response) in (expected.get("content") or {""}), f"{told}: {response.headers}"
    _check_headers(told, expected.get("headers", {}), response.headers)
    return expected


def check_body(media_type: str, expected: Node, body: bytes) -> None:
    if not expected.get("content"):
        assert body == b""
        return
    if media_type == NDJSON:
        _check_stream(expected["content"][NDJSON]["schema"], body)
    elif media_type == PACKED_MEDIA_TYPE:
        _check_packed(body)
    elif media_type in JSON:
        schema = expected["content"][media_type]["schema"]
        _compiled(json.dumps(schema)).validate(json.loads(body))
    elif media_type != BINARY:
        body.decode()


def _check_packed(body: bytes) -> None:
    if b'\\"items\\":' in body[:4096]:
        scores = unpack_scores(body).answer.model_dump(mode="json")
        _validator("ScoreAnswer").validate(scores)
        return
    answer = unpack(body).answer.model_dump(mode="json")
    _validator("RolloutAnswer").validate(answer)


def _checked_refusal(path: str, response: httpx.Response) -> Node:
    """A refusal of a path or method that is not in the contract."""
    allowed = {operation.method for operation in operations() if operation.matches(path)}
    if allowed:
        assert response.status_code == 405
        assert set(response.headers["allow"].split(", ")) == allowed
    else:
        assert response.status_code == 404
    return {"content": {"application/problem+json": {"schema": schemas()["Problem"]}}}


def _check_headers(told: str, expected: dict[str, Node], headers: httpx.Headers) -> None:
    documented = {name.lower(): node for name, node in expected.items()}
    unknown = headers.keys() - documented.keys() - OF_HTTP
    assert not unknown, f"{told} with {unknown}"
    for name, node in documented.items():
        assert name in headers or not node.get("required"), f"{told} without {name}"
        if name in headers:
            integer = node["schema"].get("type") == "integer"
            value = int(headers[name]) if integer else headers[name]
            _compiled(json.dumps(node["schema"])).validate(value)


def _check_stream(schema: Node, body: bytes) -> None:
    """Each line is a record; the first and the last of a rollout have required types."""
    records = [json.loads(line) for line in body.splitlines()]
    validator = _compiled(json.dumps(schema))
    for record in records:
        validator.validate(record)
    if schema == schemas()["SessionsRecord"]:
        return
    assert (records[0]["type"], records[-1]["type"]) == ("start", "end")


def _media_type(response: httpx.Response) -> str:
    media_type: str = response.headers.get("content-type", "")
    return media_type.partition(";")[0]


@cache
def _validator(component: str) -> jsonschema_rs.Validator:
    return _compiled(json.dumps(schemas()[component]))


@cache
def _compiled(schema: str) -> jsonschema_rs.Validator:
    return jsonschema_rs.Draft202012Validator(json.loads(schema), validate_formats=True)
