"""Bytes that arrive in order in one thread and are waited for, and checked, in others."""

import threading

import xxhash

from coppice.errors import CoppiceError, KvLost
from coppice.prompt_kv.layout import Part


class Arrival:
    """Of one file into `bytes`. Each part is checked once, by whoever asks for it first."""

    def __init__(self, room: memoryview, arrived: int = 0) -> None:
        self.bytes = room
        self._arrived = arrived
        self._error: CoppiceError | None = None
        self._changed = threading.Condition()
        self._checked: set[str] = set()

    @property
    def num_arrived(self) -> int:
        return self._arrived

    def grown(self, arrived: int) -> None:
        with self._changed:
            self._arrived = arrived
            self._changed.notify_all()

    def broken(self, error: CoppiceError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def take(self, part: Part) -> memoryview:
        """Waits until it is there; KvLost if it never will be, or is not what it should be."""
        with self._changed:
            self._changed.wait_for(lambda: self._arrived >= part.end or self._error is not None)
            if self._arrived < part.end:
                raise KvLost(f"prompt KV broke off: {self._error}") from self._error
        taken = self.bytes[part.start : part.end]
        if part.name not in self._checked:
            if xxhash.xxh3_64_hexdigest(taken) != part.xxh3_64:
                raise KvLost(f"the bytes of {part.name} are not those that were sealed")
            self._checked.add(part.name)
        return taken
