"""Reads of prompt-KV files from the server's memory over NIXL, without work on the server.

The server neither sees such a read nor waits for it. The lease is therefore renewed first, and the
read is abandoned before the lease expires. The server keeps the bytes unchanged for a while after
that, and checksums verify the result.
"""

import base64
import binascii
import secrets
import threading
from typing import Any

import numpy as np

from coppice.errors import BadAnswer, CoppiceError, KvLost
from coppice.prompt_kv.http_client import KvHttpClient
from coppice.prompt_kv.nixl_agent import Agent
from coppice.wire.kv import KvAgent, KvHandle, KvLocator


class NixlReader:
    """Reader for the agents of servers; thread-safe.

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
        """Reads the file. Returns None if the locator is unusable; raises KvLost on failure."""
        name, offset = locator.agent, locator.offset
        if name is None or offset is None or name in self._failed_agents:
            return None
        room: Any = np.empty(handle.num_bytes, np.uint8)
        try:
            agent, owner = self._get_agent(handle, name)
            memory = agent.register(room.ctypes.data, handle.num_bytes)
            start = owner.address + offset
            agent.read(name, start, room.ctypes.data, handle.num_bytes, until)
            agent.unregister(memory)
        except CoppiceError:
            self._abandon(name, room)
            raise
        except Exception as error:  # NIXL's exceptions have no common base class
            self._abandon(name, room)
            raise KvLost(f"the one-sided read failed: {error!r}") from error
        return memoryview(room)

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
            met = agent.connect(base64.b64decode(owner.metadata, validate=True))
        except binascii.Error as error:
            raise BadAnswer("the agent's metadata is not base64") from error
        if not met == owner.agent == name:
            raise BadAnswer(f"the server's agent is {met}, not {name}")
        return owner

    def _abandon(self, name: str, room: Any) -> None:
        """Keeps the buffer registered forever: an abandoned read may still write to it."""
        self._failed_agents.add(name)
        self._abandoned.append(room)
