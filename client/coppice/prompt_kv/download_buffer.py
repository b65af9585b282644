"""Download buffer: one thread fills it in order, others wait for parts and verify them."""

import threading

import xxhash

from coppice.errors import CoppiceError, KvLost
from coppice.prompt_kv.layout import TensorRange


class DownloadBuffer:
    """Buffer of one file. Each part is verified once, at its first use."""

    def __init__(self, room: memoryview, num_bytes_received: int = 0) -> None:
        self.bytes = room
        self._num_bytes_received = num_bytes_received
        self._error: CoppiceError | None = None
        self._changed = threading.Condition()
        self._checked: set[str] = set()

    @property
    def num_received(self) -> int:
        return self._num_bytes_received

    def on_progress(self, num_bytes_received: int) -> None:
        with self._changed:
            self._num_bytes_received = num_bytes_received
            self._changed.notify_all()

    def on_error(self, error: CoppiceError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def wait_for_part(self, part: TensorRange) -> memoryview:
        """Waits for the part. Raises KvLost if it cannot arrive or its checksum is wrong."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_bytes_received >= part.end or self._error is not None
            )
            if self._num_bytes_received < part.end:
                raise KvLost(f"prompt KV broke off: {self._error}") from self._error
        data = self.bytes[part.start : part.end]
        if part.name not in self._checked:
            if xxhash.xxh3_64_hexdigest(data) != part.xxh3_64:
                raise KvLost(f"the bytes of {part.name} are not those that were sealed")
            self._checked.add(part.name)
        return data
