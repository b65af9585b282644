"""Driver that follows trusted redirects between replicas."""

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from coppice.errors import Redirected
from coppice.transport.driver import Driver
from coppice.transport.messages import HttpRequest, HttpResponse
from coppice.transport.redirect_policy import MAX_REDIRECTS, RedirectPolicy

T = TypeVar("T")


class RedirectingDriver:
    """Follows redirects. Every request starts at the client's base URL: objects may move again."""

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

    async def run_steps(self, steps: Generator[None, None, T]) -> T:
        return await self._driver.run_steps(steps)

    async def close(self) -> None:
        await self._driver.close()

    def _redirected(self, call: HttpRequest, location: str | None) -> HttpRequest:
        return replace(call, base_url=self._redirect_policy.redirect_base_url(location, call.path))
