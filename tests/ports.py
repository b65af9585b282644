"""A port to be listened at later."""

import random
import socket
from contextlib import suppress

# The kernel gives others away, from 32768 on: one of those could be anybody's before it is bound.
_BELOW_THE_KERNELS = range(15000, 32000)


def free_port() -> int:
    while True:
        port = random.SystemRandom().choice(_BELOW_THE_KERNELS)
        with socket.socket() as finder, suppress(OSError):
            finder.bind(("127.0.0.1", port))
            return port
