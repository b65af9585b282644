"""The process that a server under test has its arena read from, and what it takes to have one."""

import time
from collections.abc import Callable

import psutil
import pytest

from coppice.prompt_kv.nixl import installed

needs_nixl = pytest.mark.skipif(not installed(), reason="NIXL is not installed")
PATIENCE_SECONDS = 60.0


def agent_process() -> psutil.Process:
    """Of the server in this process."""
    (found,) = (
        child
        for child in psutil.Process().children()
        if "service.prompt_kv.nixl_agent" in child.cmdline()
    )
    return found


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.02)
