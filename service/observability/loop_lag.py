"""How late the event loop comes back to what was due: what every request feels of the others."""

import asyncio
from collections.abc import Callable

INTERVAL_SECONDS = 0.1


async def watch_loop_lag(observe: Callable[[float], None]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + INTERVAL_SECONDS
        await asyncio.sleep(INTERVAL_SECONDS)
        observe(max(0.0, loop.time() - due))
