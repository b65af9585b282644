"""Conversion of requests, responses and exceptions from and to httpx."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from coppice.errors import BadAnswer, ConnectionFailed, StreamBroken, TimedOut
from coppice.transport.address import parse_address
from coppice.transport.messages import FileBody, HttpRequest, HttpResponse

# A trainer may wait for any number of rollouts at once, so the pool has no connection limit. Idle
# connections expire before uvicorn's 5 s, so that no request meets a connection just closed.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=4.0)


def client_options(base_url: str, api_key: str | None, timeout: float | None) -> dict[str, Any]:
    """Arguments of httpx.Client and httpx.AsyncClient."""
    address = parse_address(base_url, api_key)
    headers = {"User-Agent": "coppice-client"}
    if address.authorization is not None:
        headers["Authorization"] = address.authorization
    return {
        "base_url": address.base_url,
        "headers": headers,
        "timeout": httpx.Timeout(timeout, pool=None),
        "limits": LIMITS,
    }


def to_httpx_request(
    client: httpx.Client | httpx.AsyncClient, call: HttpRequest, content: Any
) -> httpx.Request:
    headers = {"Accept": "application/json", **call.headers}
    if isinstance(call.body, FileBody):
        # With a length httpx does not use chunked encoding, and the server can reject it early.
        headers["Content-Length"] = str(call.body.num_bytes)
    return client.build_request(
        call.method,
        (call.base_url or "") + call.path,
        params=dict(call.params),
        headers=headers,
        content=content,
        timeout=_timeout(client.timeout, call),
    )


def from_httpx_response(response: httpx.Response) -> HttpResponse:
    """Converts a response whose body has been read."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpResponse(status=response.status_code, headers=headers, body=response.content)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translates httpx's exceptions to those of coppice.errors."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise TimedOut(_error_text(error), unsent=True) from error
    except httpx.TimeoutException as error:
        raise TimedOut(_error_text(error)) from error
    except httpx.DecodingError as error:
        raise BadAnswer(_error_text(error)) from error
    except httpx.ConnectError as error:
        raise ConnectionFailed(_error_text(error), unsent=True) from error
    except httpx.RequestError as error:
        raise ConnectionFailed(_error_text(error)) from error


@contextmanager
def translate_stream_errors() -> Iterator[None]:
    """Same as translate_errors, for a response whose body is being received."""
    try:
        with translate_errors():
            yield
    except ConnectionFailed as error:
        raise StreamBroken(str(error)) from error.__cause__


def _timeout(usual: httpx.Timeout, call: HttpRequest) -> httpx.Timeout:
    if call.read_timeout == "usual":
        read = None if usual.read is None else usual.read + call.server_wait_seconds
        return httpx.Timeout(connect=usual.connect, read=read, write=usual.write, pool=None)
    known = [seconds for seconds in (usual.connect, call.read_timeout) if seconds is not None]
    connect = min(known, default=None)
    return httpx.Timeout(connect=connect, read=call.read_timeout, write=usual.write, pool=None)


def _error_text(error: httpx.RequestError) -> str:
    name = type(error).__name__
    return f"{error.request.method} {error.request.url}: {error or name}"
