"""CPython settings (GC, GIL switch interval) that keep the event loop responsive."""

import asyncio
import gc
import sys

SWITCH_SECONDS = 0.0005
"""GIL switch interval: how long a busy thread keeps the GIL while the event loop waits for it.

The loop re-acquires the GIL after every system call. With the default of 5 ms a request of ten
calls takes 50 ms.
"""
COLLECT_SECONDS = 60.0
NEVER = 2**30


async def tuned(collect_seconds: float = COLLECT_SECONDS) -> None:
    """Apply the interpreter settings until cancelled. One task per process.

    CPython runs a full garbage collection whenever the heap has grown by a quarter. During a
    rollout of 65,536 samples that causes eight pauses, each longer than the one before, up to
    0.5 s. Here full collections run at fixed intervals; the young generations are collected as
    usual.
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
