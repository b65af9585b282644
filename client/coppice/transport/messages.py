"""HTTP requests and responses, independent of the HTTP library."""

import base64
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from coppice.errors import BadAnswer, GatewayFailed, Redirected, error_of
from coppice.wire.packed.requests import PACKED_MEDIA_TYPE, pack_request
from coppice.wire.problem_catalogue import Problem

A = TypeVar("A", bound=BaseModel)

JSON = "application/json"
OCTET_STREAM = "application/octet-stream"
MAX_JSON_BYTES = 2**20
"""Size of the largest JSON body that is sent if the route accepts packed bodies."""
CHUNK_BYTES = 2**20
"""Bytes read, hashed, written or sent per step; cancellation takes effect between two steps."""
_GATEWAY_STATUSES = (502, 503, 504)


Chunk = bytes | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedBody:
    """HTTP request body that is produced in chunks, for bodies too large for memory.

    `chunks` is called once per attempt to send the body.
    """

    num_bytes: int
    chunks: Callable[[], Generator[Chunk, None, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """HTTP request without the server's address and credentials."""

    method: str
    path: str
    base_url: str | None = None
    """Base URL after a redirect; None means the client's own."""
    params: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | StreamedBody | None = None
    read_timeout: float | Literal["usual"] | None = "usual"
    """Longest silence of the server in seconds; None means no limit."""
    server_wait_seconds: float = 0.0
    """Seconds for which the server may delay its response; added to the usual timeout."""
    is_idempotent: bool = False
    """True if sending the request twice has the same effect as sending it once."""


def json_request(
    method: str,
    path: str,
    body: BaseModel,
    *,
    headers: Mapping[str, str] | None = None,
    read_timeout: float | Literal["usual"] | None = "usual",
    is_idempotent: bool = False,
    sends_none: bool = False,
    is_packable: bool = False,
) -> HttpRequest:
    """Request with a JSON body, in which fields that are None are null if `sends_none`.

    If the route accepts packed bodies, one with many token ids is sent packed.
    """
    content, media_type = body.model_dump_json(exclude_none=not sends_none).encode(), JSON
    if is_packable and len(content) > MAX_JSON_BYTES:
        content, media_type = pack_request(body), PACKED_MEDIA_TYPE
    return HttpRequest(
        method=method,
        path=path,
        headers={"Content-Type": media_type, **(headers or {})},
        body=content,
        read_timeout=read_timeout,
        is_idempotent=is_idempotent,
    )


def file_request(
    path: str,
    file: Path,
    digest: bytes,
    *,
    params: Mapping[str, str] | None = None,
    read_timeout: float | None = None,
    is_idempotent: bool = True,
) -> HttpRequest:
    """Builds a PUT request that uploads a file with the file's SHA-256."""
    body = StreamedBody(num_bytes=file.stat().st_size, chunks=partial(file_chunks, file))
    return upload_request(
        path,
        body,
        digest,
        params=params,
        read_timeout=read_timeout,
        is_idempotent=is_idempotent,
    )


def file_chunks(file: Path) -> Generator[Chunk, None, None]:
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            yield chunk


def upload_request(
    path: str,
    body: StreamedBody,
    digest: bytes | None,
    *,
    params: Mapping[str, str] | None = None,
    read_timeout: float | None = None,
    is_idempotent: bool = True,
) -> HttpRequest:
    """Builds a PUT request of a streamed body, with its SHA-256 if that is known already."""
    headers = {"Content-Type": OCTET_STREAM}
    if digest is not None:  # RFC 9530
        headers["Content-Digest"] = f"sha-256=:{base64.b64encode(digest).decode()}:"
    return HttpRequest(
        method="PUT",
        path=path,
        params=params or {},
        headers=headers,
        body=body,
        read_timeout=read_timeout,
        is_idempotent=is_idempotent,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """Complete HTTP response. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    @property
    def succeeded(self) -> bool:
        return 200 <= self.status < 300

    def read(self, model: type[A]) -> A:
        """Parses the body as `model`. Raises the corresponding exception if the request failed."""
        self.check()
        try:
            return model.model_validate_json(self.body)
        except ValidationError as error:
            raise BadAnswer(f"the response is not a valid {model.__name__}: {error}") from error

    def check(self) -> None:
        if self.succeeded:
            return
        if self.status == 307:
            raise Redirected("too many redirects", location=self.headers.get("location"))
        if not self.headers.get("content-type", "").startswith("application/problem+json"):
            kind = GatewayFailed if self.status in _GATEWAY_STATUSES else BadAnswer
            excerpt = self.body[:200].decode(errors="replace")
            raise kind(f"status {self.status} without a problem document: {excerpt}")
        raise error_of(self._problem())

    def _problem(self) -> Problem:
        try:
            problem = Problem.model_validate_json(self.body)
        except ValidationError as error:
            raise BadAnswer(
                f"status {self.status} with an invalid problem document: {error}"
            ) from error
        seconds = self.headers.get("retry-after", "")
        if problem.retry_after_seconds is not None or not seconds.isdecimal():
            return problem
        return problem.model_copy(update={"retry_after_seconds": float(seconds)})
