"""P10: readers of prompt KV do not slow down other requests.

The figures of the invariant are measured by bench/kv_transport.py on a quiet machine. This test
compares no times: it counts the bytes that the fastest possible readers get in one iteration of the
event loop, while other requests wait.
"""

import asyncio
from pathlib import Path

from starlette.types import Message

from service.kv.handles.downloads import PIECE_BYTES
from tests.service.prompt_kv.stalled_readers import CAPACITY, NUM_BYTES, exporting, large_handle
from tests.serving import Served, serving

NUM_READERS = 4


class InstantReader:
    """An ASGI connection that takes each part of a download at once."""

    def __init__(self) -> None:
        self.num_bytes = 0

    async def read(self, served: Served, handle: str) -> None:
        path = f"/v1/kv/{handle}/data"
        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b""}
        await served.app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError("the connection does not close")

    async def _send(self, message: Message) -> None:
        self.num_bytes += len(message.get("body", b""))


async def test_readers_get_one_piece_each_per_iteration_of_the_event_loop(tmp_path: Path) -> None:
    async with serving(exporting(), tmp_path, kv=CAPACITY) as served:
        handle = await large_handle(served)
        readers = [InstantReader() for _ in range(NUM_READERS)]
        reads = [asyncio.create_task(reader.read(served, handle)) for reader in readers]
        most, before = 0, 0
        while not all(read.done() for read in reads):
            await asyncio.sleep(0)
            read = sum(reader.num_bytes for reader in readers)
            most, before = max(most, read - before), read
        await asyncio.gather(*reads)
        assert min(reader.num_bytes for reader in readers) > NUM_BYTES
        assert most <= NUM_READERS * PIECE_BYTES
