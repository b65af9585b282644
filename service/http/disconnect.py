"""Work that is done for as long as somebody waits for it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response

Result = TypeVar("Result")

NOBODY_READS = Response(status_code=499)


async def while_connected(request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result, or None after the caller has gone; the work is cancelled then.

    The body must have been read: what arrives after it can only be the disconnect.
    """
    left = asyncio.create_task(_left(request))
    done = asyncio.create_task(work)
    try:
        await asyncio.wait({left, done}, return_when=asyncio.FIRST_COMPLETED)
        return done.result() if done.done() else None
    finally:
        for task in (left, done):
            task.cancel()
        await asyncio.gather(left, done, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
