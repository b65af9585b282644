"""Interface between the client's core and its I/O, for asyncio and blocking programs.

The core consists of coroutines over a Driver. The asynchronous driver awaits. The blocking driver
does its work inside the call and never suspends, so the coroutines complete in one step without an
event loop.
"""

from collections.abc import AsyncGenerator, Generator
from typing import Protocol, TypeVar

from coppice.transport.messages import HttpRequest, HttpResponse

T = TypeVar("T")

CHUNK_BYTES = 4 * 2**20
"""Bytes read, hashed, written or sent per step; cancellation takes effect between two steps."""


class Driver(Protocol):
    """Protocol of drivers.

    send: returns the response, whatever its status. Raises TransportError if there is none.
    receive: yields the chunks of a response as they arrive. An unsuccessful status is raised as its
        exception first. Raises TransportError if the response ends early. Closing the generator
        closes the connection.
    run_steps: runs short blocking steps, outside the event loop if there is one. When it is
        cancelled, no step is running any more.
    """

    async def send(self, call: HttpRequest) -> HttpResponse: ...

    def receive(self, call: HttpRequest) -> AsyncGenerator[bytes, None]: ...

    async def run_steps(self, steps: Generator[None, None, T]) -> T: ...

    async def close(self) -> None: ...
