"""Downloads of a large prompt's KV over sockets that do not read."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from coppice.wire.rollouts import RolloutAnswer
from tests.fake_engine import FakeEngine
from tests.service.keyfile import bearer
from tests.service.prompt_kv.export_requests import rollout_body
from tests.serving import Served

NUM_BYTES = 16 * 10**6
CAPACITY: dict[str, Any] = {"capacity_bytes": 20 * 2**20}
SHORT_PATIENCE = {"write_seconds": 0.3}


def exporting() -> FakeEngine:
    return FakeEngine(prompt_kv=True, max_context_tokens=20_000)


async def large_handle(
    served: Served, headers: dict[str, str] | None = None, *, lease_seconds: float = 60.0
) -> str:
    """A handle on 16 MiB: more than socket buffers hold without a reader."""
    body = rollout_body([*range(256)] * 64, lease_seconds=lease_seconds)
    answer = await served.http.post("/v1/rollouts", json=body, headers=headers)
    (group,) = RolloutAnswer.model_validate_json(answer.content).groups
    assert group.kv is not None, group.kv_reason
    assert group.kv.num_bytes > NUM_BYTES
    return group.kv.handle


def arena_is_free(served: Served) -> bool:
    status = served.server.prompt_kv.status()
    return status.free_bytes == status.capacity_bytes


async def wait_until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


class stalled_reader:
    """Sends a request and reads only the head of the answer."""

    def __init__(self, served: Served, handle_id: str, key: str = "") -> None:
        host, port = served.url.removeprefix("http://").split(":")
        self._address = (host, int(port))
        head = f"GET /v1/kv/{handle_id}/data HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in bearer(key).items() if key)
        self._request = f"{head}\r\n".encode()

    def __enter__(self) -> socket.socket:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(self._address)
        self._socket.sendall(self._request)
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.close()


def read_to_end(reader: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
    while b"\r\n\r\n" not in received:
        received += reader.recv(4096)
    body = received.partition(b"\r\n\r\n")[2]
    while len(body) < num_bytes:
        if not (part := reader.recv(2**16)):
            raise ConnectionResetError("the connection ended early")
        body += part
    return bytes(body)
