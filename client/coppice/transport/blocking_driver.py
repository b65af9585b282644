"""Driver for programs without an event loop, and the runner of its coroutines."""

import random
import time
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import httpx

from coppice.transport.driver import CHUNK_BYTES
from coppice.transport.httpx_types import (
    from_httpx_response,
    to_httpx_request,
    translate_errors,
    translate_stream_errors,
)
from coppice.transport.messages import FileBody, HttpRequest, HttpResponse

T = TypeVar("T")


class BlockingClock:
    """Clock of programs without an event loop; `sleep` blocks."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def random(self) -> float:
        return random.random()


class BlockingDriver:
    """Driver over httpx.Client, which it owns. Its coroutines never suspend."""

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
    """Runs a coroutine over a BlockingDriver: it completes in its first step."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a coroutine over a blocking driver has suspended")


def iterate_sync(items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """Iterates an async generator over a BlockingDriver; closing this closes it, too."""
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
def _content(call: HttpRequest) -> Iterator[bytes | Generator[bytes, None, None] | None]:
    if not isinstance(call.body, FileBody):
        yield call.body
        return
    with closing(_chunks(call.body)) as chunks:
        yield chunks


def _chunks(body: FileBody) -> Generator[bytes, None, None]:
    with body.path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
