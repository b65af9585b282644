"""Full collections of the garbage collector at fixed intervals.

CPython runs one whenever the heap has grown by a quarter. While a rollout of 65,536 samples grows,
that is eight pauses of the event loop, each longer than the last and up to 0.5 s. Young objects
are collected as always.
"""

import asyncio
import gc

EVERY_SECONDS = 60.0
NEVER = 2**30


async def collect_at_intervals(seconds: float = EVERY_SECONDS) -> None:
    """Until it is cancelled. One per process."""
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        while True:
            await asyncio.sleep(seconds)
            gc.collect()
    finally:
        gc.set_threshold(young, middle, old)
