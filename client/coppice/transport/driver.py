"""Protocols of an HTTP driver and a clock, and a wrapper of any driver that follows redirects.

The core consists of coroutines over a Driver. The asynchronous driver awaits. The blocking driver
does its work inside the call and never suspends, so the coroutines complete in one step without an
event loop.
"""

from collections.abc import AsyncGenerator, Coroutine, Generator, Sequence
from contextlib import aclosing
from dataclasses import replace
from threading import Event
from typing import Any, Protocol, TypeVar

from coppice.errors import Redirected
from coppice.transport.messages import HttpRequest, HttpResponse
from coppice.transport.redirects import MAX_REDIRECTS, RedirectPolicy

T = TypeVar("T")


class Clock(Protocol):
    """Clock and random number source, replaceable in tests.

    now: monotonic time in seconds.
    sleep: waits; over a blocking driver it does not suspend.
    random: uniform in [0, 1).
    """

    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...

    def random(self) -> float: ...


class Driver(Protocol):
    """Interface of the drivers that send HTTP requests, asynchronous or blocking.

    send: returns the response, whatever its status. Raises TransportError if there is none.
    receive: yields the chunks of a response as they arrive. An unsuccessful status is raised as its
        exception first. Raises TransportError if the response ends early. Closing the generator
        closes the connection.
    run_all: runs coroutines over this driver at the same time; returns their results in order. When
        one fails, `stop` is set, the others are cancelled or waited for, and its exception is
        raised.
    run_steps: runs short blocking steps, outside the event loop if there is one. When it is
        cancelled, no step is running any more.
    """

    async def send(self, call: HttpRequest) -> HttpResponse: ...

    def receive(self, call: HttpRequest) -> AsyncGenerator[bytes, None]: ...

    async def run_all(self, calls: Sequence[Coroutine[Any, Any, T]], stop: Event) -> list[T]: ...

    async def run_steps(self, steps: Generator[None, None, T]) -> T: ...

    async def close(self) -> None: ...


class RedirectingDriver:
    """HTTP driver that follows redirects between trusted replicas.

    Every request starts at the client's base URL, because objects may move again.
    """

    def __init__(self, driver: Driver, redirect_policy: RedirectPolicy) -> None:
        self._driver = driver
        self._redirect_policy = redirect_policy

    async def send(self, call: HttpRequest) -> HttpResponse:
        reply = await self._driver.send(call)
        for _ in range(MAX_REDIRECTS):
            if reply.status != 307:
                break
            reply = await self._driver.send(self._redirected(call, reply.headers.get("location")))
        return reply

    async def receive(self, call: HttpRequest) -> AsyncGenerator[bytes, None]:
        current = call
        for hop in range(MAX_REDIRECTS + 1):
            try:
                async with aclosing(self._driver.receive(current)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except Redirected as redirected:
                if hop == MAX_REDIRECTS:
                    raise
                current = self._redirected(call, redirected.location)

    async def run_all(self, calls: Sequence[Coroutine[Any, Any, T]], stop: Event) -> list[T]:
        return await self._driver.run_all(calls, stop)

    async def run_steps(self, steps: Generator[None, None, T]) -> T:
        return await self._driver.run_steps(steps)

    async def close(self) -> None:
        await self._driver.close()

    def _redirected(self, call: HttpRequest, location: str | None) -> HttpRequest:
        return replace(call, base_url=self._redirect_policy.redirect_base_url(location, call.path))
