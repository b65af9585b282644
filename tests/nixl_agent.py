"""The NIXL agent process of a server under test, and the requirements to run one."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from coppice.prompt_kv.nixl import installed

needs_nixl = pytest.mark.skipif(not installed(), reason="NIXL is not installed")
PATIENCE_SECONDS = 60.0


def agent_process() -> psutil.Process:
    """The agent process of the server in this process."""
    (found,) = (
        child
        for child in psutil.Process().children()
        if "service.kv.handles.nixl_agent" in child.cmdline()
    )
    return found


def suspend(process: psutil.Process) -> None:
    """Stop all threads of a process, and wait until the last one has stopped.

    The others run on, and serve reads, until the thread that receives the signal gets a processor.
    """
    process.suspend()
    threads = Path(f"/proc/{process.pid}/task")
    eventually(lambda: all(_state(thread) == "T" for thread in threads.iterdir()))


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.02)
