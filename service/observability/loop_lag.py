"""How late the event loop comes back to what was due: what every request feels of the others."""

import asyncio
from collections.abc import Callable

EVERY_SECONDS = 0.1


async def watch_lag(observe: Callable[[float], None]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + EVERY_SECONDS
        await asyncio.sleep(EVERY_SECONDS)
        observe(max(0.0, loop.time() - due))
