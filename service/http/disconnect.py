"""Cancellation of work when its client disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response

Result = TypeVar("Result")

CLIENT_DISCONNECTED = Response(status_code=499)


async def cancel_on_disconnect(
    request: Request, work: Coroutine[Any, Any, Result]
) -> Result | None:
    """Result of `work`; None if the client disconnected, in which case the work is cancelled.

    The body must have been read before: the only message after it is the disconnect.
    """
    disconnected = asyncio.create_task(_wait_for_disconnect(request))
    done = asyncio.create_task(work)
    try:
        await asyncio.wait({disconnected, done}, return_when=asyncio.FIRST_COMPLETED)
        return done.result() if done.done() else None
    finally:
        for task in (disconnected, done):
            task.cancel()
        await asyncio.gather(disconnected, done, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
