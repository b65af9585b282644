"""The driver of programs without an event loop, and what runs the core's coroutines there."""

import random
import time
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import httpx

from coppice.transport.driver import CHUNK_BYTES
from coppice.transport.httpx_types import reply_of, request_of, translated, translated_stream
from coppice.transport.messages import Call, FileBody, Reply

T = TypeVar("T")


class BlockingPace:
    """The real thing."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def random(self) -> float:
        return random.random()


class BlockingDriver:
    """Owns its httpx client. Nothing here awaits."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    async def send(self, call: Call) -> Reply:
        with _content(call) as content:
            request = request_of(self._client, call, content)
            with translated():
                return reply_of(self._client.send(request))

    async def receive(self, call: Call) -> AsyncGenerator[bytes, None]:
        request = request_of(self._client, call, call.body)
        with translated():
            response = self._client.send(request, stream=True)
        with closing(response), translated_stream():
            if not response.is_success:
                response.read()
                reply_of(response).check()
            for chunk in response.iter_bytes():
                yield chunk

    async def work(self, steps: Generator[None, None, T]) -> T:
        with closing(steps):
            while True:
                try:
                    next(steps)
                except StopIteration as done:
                    result: T = done.value
                    return result

    async def close(self) -> None:
        self._client.close()


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine of the core over a BlockingDriver: it ends in its first step."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a coroutine over a blocking driver has suspended")


def iterate(items: AsyncGenerator[T, None]) -> Generator[T, None, None]:
    """The same for a generator; closing this one closes that one."""
    try:
        while True:
            try:
                item = run(_next(items))
            except StopAsyncIteration:
                return
            yield item
    finally:
        run(_close(items))


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)


async def _close(items: AsyncGenerator[T, None]) -> None:
    await items.aclose()


@contextmanager
def _content(call: Call) -> Iterator[bytes | Generator[bytes, None, None] | None]:
    if not isinstance(call.body, FileBody):
        yield call.body
        return
    with closing(_chunks(call.body)) as chunks:
        yield chunks


def _chunks(body: FileBody) -> Generator[bytes, None, None]:
    with body.path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk
