"""NIXL agents over UCX for one-sided reads of prompt KV from the server's memory.

The bindings are used without NIXL's Python wrapper, whose progress thread has no configurable delay
and would keep a core busy. torch is not needed.
"""

import base64
import binascii
import importlib
import logging
import secrets
import threading
import time
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import numpy as np

from coppice.errors import BadAnswer, CoppiceError, KvLost
from coppice.prompt_kv.http_client import KvHttpClient
from coppice.wire.prompt_kv import KvAgent, KvHandle, KvLocator

MODULES = ("nixl_cu13", "nixl_cu12")
POLL_SECONDS = 0.0005
# Longest sleep of the owner's progress thread when no event wakes it.
IDLE_MICROSECONDS = 100_000


def installed() -> bool:
    return any(find_spec(name) for name in MODULES)


class Agent:
    """Thread-safe wrapper of a NIXL agent, which registers memory and reads that of peers.

    Peers need its `metadata`, which is sent outside of NIXL. UCX does not authenticate peers: its
    ports belong on a separate network.
    """

    def __init__(self, name: str, *, is_owner: bool) -> None:
        """Creates the agent, with a progress thread if it owns the memory that peers read.

        An agent that only reads makes progress only while it waits.
        """
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
        """NIXL metadata of the agent for its peers, including all memory registered so far."""
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
        """Reads a peer's memory into registered memory; gives up at the monotonic time `until`.

        After an exception late bytes may still arrive at `target`.
        """
        local, remote = self._part(target, num_bytes), self._part(source, num_bytes)
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
            raise KvLost(f"the one-sided read failed: {state}")

    def _part(self, address: int, num_bytes: int) -> Any:
        part = self._nixl.nixlXferDList(self._nixl.DRAM_SEG)
        part.addDesc((address, num_bytes, 0))
        return part


def _bindings() -> ModuleType:
    """Imports NIXL's Python bindings and restores logging.raiseExceptions, which they disable."""
    complaining = logging.raiseExceptions
    try:
        name = next(name for name in MODULES if find_spec(name))
        return importlib.import_module(f"{name}._bindings")
    finally:
        logging.raiseExceptions = complaining


class NixlReader:
    """Thread-safe reader of prompt-KV files from the memory of servers, by NIXL.

    The server neither sees such a read nor waits for it. The lease is therefore renewed first, and
    the read is abandoned before the lease expires. The server keeps the bytes unchanged for a while
    after that, and checksums verify the result.

    An agent is not used again after a failed read. After a restart the server has a new agent.
    """

    def __init__(self, endpoint: KvHttpClient) -> None:
        self._endpoint = endpoint
        self._lock = threading.Lock()
        self._agent: Agent | None = None
        self._agents: dict[str, KvAgent] = {}
        self._failed_agents: set[str] = set()
        self._abandoned: list[Any] = []

    def get_file(self, handle: KvHandle, locator: KvLocator, until: float) -> memoryview | None:
        """Reads a prompt-KV file by NIXL. Returns None if impossible; raises KvLost on failure."""
        name, offset = locator.agent, locator.offset
        if name is None or offset is None or name in self._failed_agents:
            return None
        buffer: Any = np.empty(handle.num_bytes, np.uint8)
        try:
            agent, owner = self._get_agent(handle, name)
            memory = agent.register(buffer.ctypes.data, handle.num_bytes)
            start = owner.address + offset
            agent.read(name, start, buffer.ctypes.data, handle.num_bytes, until)
            agent.unregister(memory)
        except CoppiceError:
            self._abandon(name, buffer)
            raise
        except Exception as error:  # NIXL's exceptions have no common base class
            self._abandon(name, buffer)
            raise KvLost(f"the one-sided read failed: {error!r}") from error
        return memoryview(buffer)

    def _get_agent(self, handle: KvHandle, name: str) -> tuple[Agent, KvAgent]:
        with self._lock:
            if self._agent is None:
                self._agent = Agent(f"reader-{secrets.token_hex(8)}", is_owner=False)
            if name not in self._agents:
                self._agents[name] = self._connect(self._agent, handle, name)
            return self._agent, self._agents[name]

    def _connect(self, agent: Agent, handle: KvHandle, name: str) -> KvAgent:
        owner = self._endpoint.request("GET", f"/v1/kv/{handle.handle}/agent").read(KvAgent)
        try:
            connected = agent.connect(base64.b64decode(owner.metadata, validate=True))
        except binascii.Error as error:
            raise BadAnswer("the agent's metadata is not base64") from error
        if not connected == owner.agent == name:
            raise BadAnswer(f"the server's agent is {connected}, not {name}")
        return owner

    def _abandon(self, name: str, buffer: Any) -> None:
        """Keeps the buffer of a failed read registered forever, as late bytes may still arrive.

        The remote agent is not used again.
        """
        self._failed_agents.add(name)
        self._abandoned.append(buffer)
