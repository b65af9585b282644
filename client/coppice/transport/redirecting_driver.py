"""A driver that goes where a replica sends it, as far as it is trusted."""

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from coppice.errors import Redirected
from coppice.transport.driver import Driver
from coppice.transport.messages import Call, Reply
from coppice.transport.redirect_policy import MAX_HOPS, Trust

T = TypeVar("T")


class Following:
    """Every call begins at the address that the client was made with: what moved may move again."""

    def __init__(self, driver: Driver, trust: Trust) -> None:
        self._driver = driver
        self._trust = trust

    async def send(self, call: Call) -> Reply:
        reply = await self._driver.send(call)
        for _ in range(MAX_HOPS):
            if reply.status != 307:
                break
            reply = await self._driver.send(self._moved(call, reply.headers.get("location")))
        return reply

    async def receive(self, call: Call) -> AsyncGenerator[bytes, None]:
        at = call
        for hop in range(MAX_HOPS + 1):
            try:
                async with aclosing(self._driver.receive(at)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except Redirected as redirected:
                if hop == MAX_HOPS:
                    raise
                at = self._moved(call, redirected.location)

    async def work(self, steps: Generator[None, None, T]) -> T:
        return await self._driver.work(steps)

    async def close(self) -> None:
        await self._driver.close()

    def _moved(self, call: Call, location: str | None) -> Call:
        return replace(call, base_url=self._trust.base_of(location, call.path))
