"""The bare-socket baseline sends the same bytes as a handle has."""

from pathlib import Path

import numpy as np

from bench.harness.bare_sockets import bare_sender, read_once
from coppice import KvHandle
from coppice.wire.prompt_kv import KvLocator

NUM_BYTES = 3 * 2**20 + 17


def test_bare_sender_sends_the_bytes_of_the_handle(tmp_path: Path) -> None:
    file = tmp_path / "arena"
    data = np.random.default_rng(0).bytes(100 + NUM_BYTES)
    file.write_bytes(data)
    shm = KvLocator(transport="shm", path=str(file), offset=100)
    handle = KvHandle(
        handle="kv",
        version="1",
        num_tokens=1,
        num_bytes=NUM_BYTES,
        lease_seconds=60.0,
        locators=[shm],
    )
    received = bytearray(NUM_BYTES)
    with bare_sender(handle) as port:
        read_once(port, memoryview(received))
    assert received == data[100:]
