"""The process that the arena is read from over NIXL.

    python -m service.prompt_kv.nixl_agent ARENA NUM_BYTES

It says on its standard output, in one line, how it is reached, and ends with its standard input,
which is its server's end, however that came about.
"""

import base64
import mmap
import os
import secrets
import sys

import numpy as np

from coppice.prompt_kv.nixl import Agent
from coppice.wire.kv import KvAgent


def main(path: str, num_bytes: int) -> None:
    # UCX's and NIXL's own messages go to standard output.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Network cards register only what may be written, though nobody is meant to.
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
