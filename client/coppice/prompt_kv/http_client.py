"""HTTP client that downloads prompt KV directly into preallocated memory, without extra copies.

Other HTTP libraries copy every byte several times, which would dominate the transfer time.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import urlsplit

import xxhash

from coppice.errors import (
    ConnectionFailed,
    CoppiceError,
    KvLost,
    Overloaded,
    ProblemError,
    QuotaExceeded,
    TimedOut,
)
from coppice.prompt_kv.file_layout import TensorRange
from coppice.transport.messages import HttpResponse
from coppice.transport.redirects import MAX_REDIRECTS, RedirectPolicy, ServerAddress

ATTEMPTS = 4
RETRY_SECONDS = 1.0


@contextmanager
def translate_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise TimedOut(f"prompt KV: {error}") from error
    except (OSError, HTTPException) as error:
        raise ConnectionFailed(f"prompt KV: {error!r}") from error


class KvHttpClient:
    """HTTP client for the prompt-KV routes of a server, with a new connection per request."""

    def __init__(
        self, address: ServerAddress, timeout: float | None, redirect_policy: RedirectPolicy
    ) -> None:
        self._base_url = address.base_url
        self._redirect_policy = redirect_policy
        self._timeout = timeout
        self._authorization = address.authorization

    def timeout_seconds(self, max_seconds: float) -> float:
        """Configured timeout in seconds, but at most `max_seconds`."""
        return max_seconds if self._timeout is None else min(self._timeout, max_seconds)

    def request(self, method: str, path: str, body: object = None) -> HttpResponse:
        """Sends a request and returns the response. Raises the server's error if it failed."""
        headers = {} if body is None else {"Content-Type": "application/json"}
        content = None if body is None else json.dumps(body).encode()
        with translate_errors():
            connection, response = self.open(method, path, headers, content)
            try:
                reply = _reply(response)
            finally:
                connection.close()
        reply.check()
        return reply

    def open(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None = None
    ) -> tuple[HTTPConnection, HTTPResponse]:
        """Sends a request and returns the open response; the caller must close the connection.

        Redirects to the replica that has the prompt KV are followed.
        """
        connection, response = self._open(self._base_url, method, path, headers, body)
        for _ in range(MAX_REDIRECTS):
            if response.status != 307:
                break
            connection.close()
            base_url = self._redirect_policy.redirect_base_url(
                response.headers.get("Location"), path
            )
            connection, response = self._open(base_url, method, path, headers, body)
        return connection, response

    def _open(
        self, base_url: str, method: str, path: str, headers: dict[str, str], body: bytes | None
    ) -> tuple[HTTPConnection, HTTPResponse]:
        target = urlsplit(base_url)
        assert target.hostname is not None, "an address has a host"
        kind = HTTPSConnection if target.scheme == "https" else HTTPConnection
        connection = kind(target.hostname, target.port, timeout=self._timeout)
        sent = {"User-Agent": "coppice-client", **headers}
        if self._authorization is not None:
            sent["Authorization"] = self._authorization
        try:
            connection.request(method, target.path.rstrip("/") + path, body, sent)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise


class Download:
    """Sequential download of a prompt-KV file, resumed after a broken connection.

    It fails after `ATTEMPTS` consecutive connections that delivered nothing or were rejected
    because of too many open transfers.
    """

    def __init__(self, endpoint: KvHttpClient, path: str, num_bytes: int) -> None:
        self._endpoint = endpoint
        self._path = path
        self._num_bytes = num_bytes
        self._at = 0
        self._etag: str | None = None
        self._connection: HTTPConnection | None = None
        self._response: HTTPResponse | None = None

    def readinto(self, buffer: memoryview) -> None:
        """Fills the whole buffer with the next bytes of the file."""
        failures = 0
        while buffer:
            try:
                with translate_errors():
                    count = self._read_some(buffer)
            except (ConnectionFailed, TimedOut, Overloaded, QuotaExceeded) as error:
                count, failures = 0, failures + 1
                self.close()
                if failures >= ATTEMPTS:
                    raise
                if isinstance(error, ProblemError):
                    time.sleep(error.problem.retry_after_seconds or RETRY_SECONDS)
            if count:
                self._at += count
                buffer = buffer[count:]
                failures = 0

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._response = None

    def _read_some(self, buffer: memoryview) -> int:
        response = self._response or self._begin()
        count = response.readinto(buffer)
        if not count:
            raise ConnectionResetError("the connection ended early")
        return count

    def _begin(self) -> HTTPResponse:
        headers = {"Range": f"bytes={self._at}-"} if self._at else {}
        if self._etag is not None and self._at:
            headers["If-Range"] = self._etag
        self._connection, response = self._endpoint.open("GET", self._path, headers)
        if response.status >= 300:
            _reply(response).check()
        length = response.headers.get("Content-Length")
        etag = response.headers.get("ETag")
        if length != str(self._num_bytes - self._at) or self._etag not in (None, etag):
            raise KvLost("the server's file does not match the handle")
        self._etag = etag
        self._response = response
        return response


def _reply(response: HTTPResponse) -> HttpResponse:
    headers = {name.lower(): value for name, value in response.getheaders()}
    return HttpResponse(status=response.status, headers=headers, body=response.read())


class DownloadBuffer:
    """Buffer that one thread fills with a file, in order, while others wait for parts of the file.

    Each part is verified once, at its first use.
    """

    def __init__(self, buffer: memoryview, num_bytes_received: int = 0) -> None:
        self.bytes = buffer
        self._num_bytes_received = num_bytes_received
        self._error: CoppiceError | None = None
        self._changed = threading.Condition()
        self._checked: set[str] = set()

    @property
    def num_received(self) -> int:
        return self._num_bytes_received

    def on_progress(self, num_bytes_received: int) -> None:
        with self._changed:
            self._num_bytes_received = num_bytes_received
            self._changed.notify_all()

    def on_error(self, error: CoppiceError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait_for_part(self, part: TensorRange) -> memoryview:
        """Waits for a part of the file. Raises KvLost if it cannot arrive or is corrupt."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_bytes_received >= part.end or self._error is not None
            )
            if self._num_bytes_received < part.end:
                raise KvLost(f"the prompt KV download failed: {self._error}") from self._error
        data = self.bytes[part.start : part.end]
        if part.name not in self._checked:
            if xxhash.xxh3_64_hexdigest(data) != part.xxh3_64:
                raise KvLost(f"the checksum of {part.name} is wrong")
            self._checked.add(part.name)
        return data
