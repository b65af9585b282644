"""A free TCP port to listen on later."""

import random
import socket
from contextlib import suppress

# Below 32768, where the kernel's ephemeral range starts: it could assign a port from there to any
# process before the test binds it.
_BELOW_THE_KERNELS = range(15000, 32000)


def free_port() -> int:
    while True:
        port = random.SystemRandom().choice(_BELOW_THE_KERNELS)
        with socket.socket() as finder, suppress(OSError):
            finder.bind(("127.0.0.1", port))
            return port
