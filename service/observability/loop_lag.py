"""Measurement of the event loop's lag: how late it runs a timer that is due."""

import asyncio
from collections.abc import Callable

INTERVAL_SECONDS = 0.1


async def watch_loop_lag(observe: Callable[[float], None]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + INTERVAL_SECONDS
        await asyncio.sleep(INTERVAL_SECONDS)
        observe(max(0.0, loop.time() - due))
