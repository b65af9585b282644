"""NIXL agents over UCX for one-sided reads of memory.

The bindings are used without NIXL's Python wrapper, whose progress thread has no configurable delay
and would keep a core busy. torch is not needed.
"""

import importlib
import logging
import time
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from coppice.errors import KvLost

MODULES = ("nixl_cu13", "nixl_cu12")
POLL_SECONDS = 0.0005
# Longest sleep of the owner's progress thread when no event wakes it.
IDLE_MICROSECONDS = 100_000


def installed() -> bool:
    return any(find_spec(name) for name in MODULES)


class Agent:
    """NIXL agent; thread-safe.

    Peers need its `metadata`, which is sent outside of NIXL. UCX does not authenticate peers: its
    ports belong on a separate network.
    """

    def __init__(self, name: str, *, is_owner: bool) -> None:
        """An owner has a progress thread; a reader makes progress only while it waits."""
        self._nixl = _bindings()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = is_owner
        config.pthrDelay = IDLE_MICROSECONDS
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        self._agent = self._nixl.nixlAgent(name, config)
        self._ucx = self._agent.createBackend("UCX", {})

    @property
    def metadata(self) -> bytes:
        """Metadata of the agent, including all memory registered so far."""
        metadata: bytes = self._agent.getLocalMD()
        return metadata

    def register(self, address: int, num_bytes: int) -> Any:
        memory = self._nixl.nixlRegDList(self._nixl.DRAM_SEG)
        memory.addDesc((address, num_bytes, 0, b""))
        self._agent.registerMem(memory, [self._ucx])
        return memory

    def unregister(self, memory: Any) -> None:
        self._agent.deregisterMem(memory, [self._ucx])

    def connect(self, metadata: bytes) -> str:
        name = self._agent.loadRemoteMD(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def read(self, owner: str, source: int, target: int, num_bytes: int, until: float) -> None:
        """Reads into registered memory, until the monotonic time `until`.

        After an exception late bytes may still arrive at `target`.
        """
        local, remote = (self._part(address, num_bytes) for address in (target, source))
        request = self._agent.createXferReq(
            self._nixl.NIXL_READ, local, remote, owner, b"", [self._ucx]
        )
        try:
            state = self._agent.postXferReq(request, b"")
            while state == self._nixl.NIXL_IN_PROG and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
                state = self._agent.getXferStatus(request)
        finally:
            self._agent.releaseXferReq(request)
        if state != self._nixl.NIXL_SUCCESS:
            raise KvLost(f"the one-sided read did not end well: {state}")

    def _part(self, address: int, num_bytes: int) -> Any:
        part = self._nixl.nixlXferDList(self._nixl.DRAM_SEG)
        part.addDesc((address, num_bytes, 0))
        return part


def _bindings() -> ModuleType:
    """Imports the bindings and restores logging.raiseExceptions, which they disable globally."""
    complaining = logging.raiseExceptions
    try:
        name = next(name for name in MODULES if find_spec(name))
        return importlib.import_module(f"{name}._bindings")
    finally:
        logging.raiseExceptions = complaining
