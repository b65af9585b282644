"""Process with the NIXL agent that serves one-sided reads of the arena.

    python -m service.prompt_kv.nixl_agent ARENA NUM_BYTES

It prints the agent's address as one line of JSON and exits at the end of its standard input, that
is when the server closes the pipe or dies.
"""

import base64
import mmap
import os
import secrets
import sys

import numpy as np

from coppice.prompt_kv.nixl_agent import Agent
from coppice.wire.kv import KvAgent


def main(path: str, num_bytes: int) -> None:
    # UCX and NIXL log to standard output, so file descriptor 1 is redirected to standard error.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # RDMA NICs register only writable memory, although readers must not write.
    with open(path, "r+b") as file:
        arena = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)
    name = f"coppice-{secrets.token_hex(8)}"
    agent = Agent(name, is_owner=True)
    agent.register(arena.ctypes.data, num_bytes)
    metadata = base64.b64encode(agent.metadata).decode()
    known = KvAgent(agent=name, address=arena.ctypes.data, metadata=metadata)
    print(known.model_dump_json(), file=answers, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
