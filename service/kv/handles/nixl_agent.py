"""Child process with a NIXL agent, from which trainers read exported prompt KV by RDMA.

UCX has no authentication: anyone who reaches the agent over the network can read its process
memory. The child process therefore maps the arena and nothing else, and gets only selected
environment variables. A crash in UCX does not affect the server.

    python -m service.kv.handles.nixl_agent ARENA NUM_BYTES    # the child process
"""

import asyncio
import base64
import logging
import mmap
import os
import secrets
import sys
from asyncio.subprocess import PIPE

import numpy as np

from coppice.prompt_kv.nixl import Agent, installed
from coppice.wire.prompt_kv import KvAgent
from service.kv.arena import Arena

PASSED_ENV_PREFIXES = ("CUDA_", "LD_LIBRARY_PATH", "NIXL_", "PATH", "UCX_")
NOT_INSTALLED = (
    "kv.nixl is on, but NIXL is not installed (pip install 'coppice-rl[nixl]'); "
    "one-sided reads are disabled"
)
log = logging.getLogger(__name__)


class NixlAgentProcess:
    """Child process whose NIXL agent serves one-sided reads of the prompt-KV arena.

    `agent` is the address to read from. It is set shortly after the start, and None again once the
    process has ended.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.agent: KvAgent | None = None

    async def run(self) -> None:
        """Run the agent's process until it ends; a failure disables one-sided reads only."""
        if not installed():
            log.warning(NOT_INSTALLED)
            return
        try:
            await self._run_process()
            log.error("the NIXL agent has exited; one-sided reads are disabled until a restart")
        except Exception:
            log.exception("the NIXL agent failed; one-sided reads are disabled until a restart")

    async def _run_process(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "service.kv.handles.nixl_agent"),
            *(str(self._arena.path), str(self._arena.num_bytes)),
            stdin=PIPE,  # the agent exits when this pipe is closed
            stdout=PIPE,
            env=agent_environment(),
        )
        assert process.stdout is not None, "it is a pipe"
        try:
            if line := await process.stdout.readline():
                self.agent = KvAgent.model_validate_json(line)
            await process.wait()
        finally:
            self.agent = None
            if process.returncode is None:
                process.kill()
                await process.wait()


def agent_environment() -> dict[str, str]:
    passed = {
        name: value for name, value in os.environ.items() if name.startswith(PASSED_ENV_PREFIXES)
    }
    return passed | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def run_agent(path: str, num_bytes: int) -> None:
    """Main function of the child process, which serves reads of the arena.

    It prints the agent's address as one line of JSON and exits at the end of its standard input,
    that is when the server closes the pipe or is killed.
    """
    # UCX and NIXL log to standard output, so file descriptor 1 is redirected to standard error.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # RDMA NICs register only writable memory, although readers must not write.
    with open(path, "r+b") as file:
        arena = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)
    name = f"coppice-{secrets.token_hex(8)}"
    agent = Agent(name, is_owner=True)
    agent.register(arena.ctypes.data, num_bytes)
    metadata = base64.b64encode(agent.metadata).decode()
    info = KvAgent(agent=name, address=arena.ctypes.data, metadata=metadata)
    print(info.model_dump_json(), file=output, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    run_agent(sys.argv[1], int(sys.argv[2]))
