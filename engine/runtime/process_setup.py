"""Process setup: exclusion of imports from garbage collection, process group of the engine.

Importing torch and vLLM creates a million objects that are never freed. Traversing them costs a
quarter of the import time, and later pauses of tenths of a second. So they are excluded from
garbage collection.

EngineCore creates a process group before its workers start, so they inherit it. The group survives
a Ctrl-C of the service, but not the service's exit.
"""

import atexit
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

atexit.register(gc.unfreeze)  # extension modules report frozen objects as leaks at exit


def disable_gc() -> None:
    gc.disable()


def freeze_gc() -> None:
    """Exclude all existing objects from garbage collection for good, then enable collection."""
    gc.freeze()
    gc.enable()


@contextmanager
def gc_disabled_during_imports() -> Iterator[None]:
    disable_gc()
    try:
        yield
    finally:
        freeze_gc()


def create_process_group() -> None:
    """Create a process group, so that Ctrl-C reaches only the service.

    The service then drains and stops the engine.
    """
    if os.getpgrp() != os.getpid():
        os.setpgrp()


def exit_with_service() -> None:
    """Kill EngineCore and its workers when the service dies, since vLLM would wait forever."""
    threading.Thread(target=_watch_service, daemon=True, name="service-watch").start()


def _watch_service() -> None:
    service = multiprocessing.parent_process()
    assert service is not None, "EngineCore is always a child process"
    multiprocessing.connection.wait([service.sentinel])
    if os.getpgrp() == os.getpid():
        # Kill the workers too, even if they are blocked.
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
