"""A free TCP port to listen on later."""

import os
import random
import socket
from contextlib import suppress
from itertools import cycle

# Below 32768, where the kernel's ephemeral range starts: it could assign a port from there to any
# process before the test binds it. Each process of pytest-xdist has its own ports, and takes each
# again as late as possible, so that no other test binds it first.
_FIRST, _PER_PROCESS, _NUM_PROCESSES = 15000, 1000, 17
_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
_process = int(_worker.removeprefix("gw") or -1) + 1
_first = _FIRST + _PER_PROCESS * (_process % _NUM_PROCESSES)
_start = random.SystemRandom().randrange(_PER_PROCESS)
_ports = cycle(_first + (_start + each) % _PER_PROCESS for each in range(_PER_PROCESS))


def free_port() -> int:
    while True:
        port = next(_ports)
        with socket.socket() as finder, suppress(OSError):
            finder.bind(("127.0.0.1", port))
            return port
