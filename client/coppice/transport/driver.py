"""What the core needs done outside of itself, and the one reason why it is written only once.

The core is coroutines over a Driver. The asynchronous driver awaits; the blocking one does its work
inside the call and never suspends, so that its coroutines end in one step, without an event loop.
"""

from collections.abc import AsyncGenerator, Generator
from typing import Protocol, TypeVar

from coppice.transport.messages import HttpRequest, HttpResponse

T = TypeVar("T")

CHUNK_BYTES = 4 * 2**20
"""What is read, hashed, written or sent at a time: short enough to be cancelled between two."""


class Driver(Protocol):
    """Contract.

    send: the reply, whatever its status; TransportError if there is none.
    receive: the chunks of an answer as they come. A reply that is no success is raised as its
        exception first. TransportError if the answer ends early. Closing it closes the connection.
    work: runs steps that block, each short, off the event loop if there is one. When it is
        cancelled no step is running any more.
    """

    async def send(self, call: HttpRequest) -> HttpResponse: ...

    def receive(self, call: HttpRequest) -> AsyncGenerator[bytes, None]: ...

    async def run_steps(self, steps: Generator[None, None, T]) -> T: ...

    async def close(self) -> None: ...
