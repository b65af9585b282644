"""Driver for asyncio programs."""

import asyncio
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

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


class AsyncClock:
    """Clock of asyncio programs."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def random(self) -> float:
        return random.random()


class AsyncDriver:
    """Driver over httpx.AsyncClient, which it owns."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def send(self, call: HttpRequest) -> HttpResponse:
        async with _content(call) as content:
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
    """Returns the result in a tuple once there is one; futures cannot carry a StopIteration."""
    try:
        next(steps)
    except StopIteration as done:
        return (done.value,)
    return None


async def _off_loop(function: Callable[[], T]) -> T:
    """Runs the function in a thread. Even if cancelled, it returns only after the function ends."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


@asynccontextmanager
async def _content(call: HttpRequest) -> AsyncIterator[bytes | AsyncGenerator[bytes, None] | None]:
    if not isinstance(call.body, FileBody):
        yield call.body
        return
    async with aclosing(_chunks(call.body)) as chunks:
        yield chunks


async def _chunks(body: FileBody) -> AsyncGenerator[bytes, None]:
    with body.path.open("rb") as file:
        while chunk := await _off_loop(lambda: file.read(CHUNK_BYTES)):
            yield chunk
