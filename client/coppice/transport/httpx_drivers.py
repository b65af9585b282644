"""HTTP drivers over httpx, for asyncio programs and for programs without an event loop."""

import asyncio
import random
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import aclosing, asynccontextmanager, closing, contextmanager
from threading import Event
from typing import Any, TypeVar

import httpx

from coppice.errors import BadAnswer, ConnectionFailed, StreamBroken, TimedOut
from coppice.transport.messages import Chunk, HttpRequest, HttpResponse, StreamedBody
from coppice.transport.redirects import parse_address

# A trainer may wait for any number of rollouts at once, so the pool has no connection limit. Idle
# connections expire before uvicorn's 5 s, so that no request meets a connection just closed.
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=4.0)
T = TypeVar("T")


def client_options(base_url: str, api_key: str | None, timeout: float | None) -> dict[str, Any]:
    """Arguments for httpx.Client and httpx.AsyncClient: URL, headers, timeout and limits."""
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
    if isinstance(call.body, StreamedBody):
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
    """Converts an httpx response whose body has been read to an HttpResponse."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpResponse(status=response.status_code, headers=headers, body=response.content)


@contextmanager
def translate_errors() -> Iterator[None]:
    """Context manager that translates httpx's exceptions to those of coppice.errors.

    The text of a failed connection says it all, so its traceback omits those of httpx.
    """
    try:
        yield
    except httpx.ConnectTimeout as error:
        raise TimedOut(_error_text(error), unsent=True) from None
    except httpx.TimeoutException as error:
        raise TimedOut(_error_text(error)) from error
    except httpx.DecodingError as error:
        raise BadAnswer(_error_text(error)) from error
    except httpx.ConnectError as error:
        raise ConnectionFailed(_error_text(error), unsent=True) from None
    except httpx.RequestError as error:
        raise ConnectionFailed(_error_text(error)) from error


@contextmanager
def translate_stream_errors() -> Iterator[None]:
    """Like translate_errors, for a response whose body is being received."""
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


class AsyncClock:
    """Clock and random numbers for asyncio programs; `sleep` suspends."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def random(self) -> float:
        return random.random()


class AsyncDriver:
    """Asynchronous HTTP driver, which owns an httpx.AsyncClient."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def send(self, call: HttpRequest) -> HttpResponse:
        async with _async_content(call) as content:
            request = to_httpx_request(self._client, call, content)
            with translate_errors():
                return from_httpx_response(await self._client.send(request))

    async def receive(self, call: HttpRequest) -> AsyncGenerator[bytes, None]:
        request = to_httpx_request(self._client, call, call.body)
        with translate_errors():
            response = await self._client.send(request, stream=True)
        async with aclosing(response):
            with translate_stream_errors():
                if not response.is_success:
                    await response.aread()
                    from_httpx_response(response).check()
                async for chunk in response.aiter_bytes():
                    yield chunk

    async def run_all(self, calls: Sequence[Coroutine[Any, Any, T]], stop: Event) -> list[T]:
        running = [asyncio.ensure_future(call) for call in calls]
        try:
            return await asyncio.gather(*running)
        finally:
            stop.set()
            for task in running:
                task.cancel()
            await asyncio.wait(running)

    async def run_steps(self, steps: Generator[None, None, T]) -> T:
        try:
            while (finished := await _off_loop(lambda: _step(steps))) is None:
                pass
            return finished[0]
        finally:
            steps.close()

    async def close(self) -> None:
        await self._client.aclose()


def _step(steps: Generator[None, None, T]) -> tuple[T] | None:
    """Runs the next step of a generator; returns the generator's result in a 1-tuple at the end.

    Futures cannot carry a StopIteration.
    """
    try:
        next(steps)
    except StopIteration as done:
        return (done.value,)
    return None


async def _off_loop(function: Callable[[], T]) -> T:
    """Runs a function in a thread. Even if cancelled, returns only after the function ends."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


@asynccontextmanager
async def _async_content(
    call: HttpRequest,
) -> AsyncIterator[bytes | AsyncGenerator[Chunk, None] | None]:
    if not isinstance(call.body, StreamedBody):
        yield call.body
        return
    async with aclosing(_async_chunks(call.body)) as chunks:
        yield chunks


async def _async_chunks(body: StreamedBody) -> AsyncGenerator[Chunk, None]:
    with closing(body.chunks()) as chunks:
        while (chunk := await _off_loop(lambda: next(chunks, None))) is not None:
            yield chunk


class BlockingClock:
    """Clock and random numbers for programs without an event loop; `sleep` blocks."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def random(self) -> float:
        return random.random()


class BlockingDriver:
    """Blocking HTTP driver, which owns an httpx.Client; its coroutines never suspend."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    async def send(self, call: HttpRequest) -> HttpResponse:
        with _content(call) as content:
            request = to_httpx_request(self._client, call, content)
            with translate_errors():
                return from_httpx_response(self._client.send(request))

    async def receive(self, call: HttpRequest) -> AsyncGenerator[bytes, None]:
        request = to_httpx_request(self._client, call, call.body)
        with translate_errors():
            response = self._client.send(request, stream=True)
        with closing(response), translate_stream_errors():
            if not response.is_success:
                response.read()
                from_httpx_response(response).check()
            for chunk in response.iter_bytes():
                yield chunk

    async def run_all(self, calls: Sequence[Coroutine[Any, Any, T]], stop: Event) -> list[T]:
        with ThreadPoolExecutor(len(calls), thread_name_prefix="coppice") as threads:
            running = [threads.submit(run_sync, call) for call in calls]
            try:
                for each in as_completed(running):
                    each.result()
            finally:
                stop.set()
            return [each.result() for each in running]

    async def run_steps(self, steps: Generator[None, None, T]) -> T:
        with closing(steps):
            while True:
                try:
                    next(steps)
                except StopIteration as done:
                    result: T = done.value
                    return result

    async def close(self) -> None:
        self._client.close()


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine over a BlockingDriver to its end, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a coroutine over a blocking driver has suspended")


def iterate_sync(items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Iterates an async generator over a BlockingDriver, without an event loop.

    Closing the returned generator also closes the async one.
    """
    try:
        while True:
            try:
                item = run_sync(_next(items))
            except StopAsyncIteration:
                return
            yield item
    finally:
        run_sync(_close(items))


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)


async def _close(items: AsyncGenerator[T, None]) -> None:
    await items.aclose()


@contextmanager
def _content(call: HttpRequest) -> Iterator[bytes | Generator[Chunk, None, None] | None]:
    if not isinstance(call.body, StreamedBody):
        yield call.body
        return
    with closing(call.body.chunks()) as chunks:
        yield chunks
