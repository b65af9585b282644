"""The NIXL agent process of a server under test, and the requirements to run one."""

import time
from collections.abc import Callable

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
        if "service.prompt_kv.nixl_agent" in child.cmdline()
    )
    return found


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.02)
