"""The engine's processes as the service sees them: descendants of its own."""

import multiprocessing
import os
from contextlib import suppress

import psutil


def named() -> dict[int, str]:
    """Those that vLLM has named; it does so once they work."""
    children = psutil.Process(os.getpid()).children(recursive=True)
    return {child.pid: child.name() for child in children if child.name().startswith("VLLM")}


def kill() -> None:
    """All of them, those that are only starting too."""
    for child in multiprocessing.active_children():
        with suppress(psutil.NoSuchProcess):
            core = psutil.Process(child.pid)
            for process in (*core.children(recursive=True), core):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
