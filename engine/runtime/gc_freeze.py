"""The garbage collector, kept away from imports.

Importing torch and vLLM makes a million objects that stay. The collector looks through them time
and again: a quarter of the time that the import takes, and later pauses of tenths of a second.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

atexit.register(gc.unfreeze)  # extension modules complain at the end of what was never freed


def disable_gc() -> None:
    gc.disable()


def freeze_gc() -> None:
    """What is there by now is left alone for good."""
    gc.freeze()
    gc.enable()


@contextmanager
def gc_disabled_during_imports() -> Iterator[None]:
    disable_gc()
    try:
        yield
    finally:
        freeze_gc()
