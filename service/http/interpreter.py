"""Settings of the interpreter that keep the event loop of a serving process responsive."""

import asyncio
import gc
import sys

SWITCH_SECONDS = 0.0005
"""A thread that computes holds the GIL for so long when the event loop wants it. The loop wants it
anew after every system call: with the default of 5 ms a request of ten calls takes 50 ms."""
COLLECT_SECONDS = 60.0
NEVER = 2**30


async def tuned(collect_seconds: float = COLLECT_SECONDS) -> None:
    """Until it is cancelled. One per process.

    CPython runs a full garbage collection whenever the heap has grown by a quarter. While a rollout
    of 65,536 samples grows, that is eight pauses, each longer than the last and up to 0.5 s. Here
    they come at fixed intervals; young objects are collected as always.
    """
    (young, middle, old), switch = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(young, middle, NEVER)
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        while True:
            await asyncio.sleep(collect_seconds)
            gc.collect()
    finally:
        gc.set_threshold(young, middle, old)
        sys.setswitchinterval(switch)
