"""Shared memory that the arena took for exports and that no slot uses any more.

Memory is returned in chunks, which are also the unit in which workers register the arena with a
GPU's driver. A chunk that was in use recently is kept, because its pages would be allocated again.
"""

from collections.abc import Callable, Iterable

from engine.kv_types import ARENA_CHUNK_BYTES
from service.prompt_kv.arena import Extent


class IdleMemory:
    """Chunks of an arena that have pages, with the time when a slot last used them."""

    def __init__(
        self, capacity_bytes: int, *, idle_seconds: float, clock: Callable[[], float]
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._idle_seconds = idle_seconds
        self._clock = clock
        self._used_at: dict[int, float] = {}

    def on_used(self, extent: Extent) -> None:
        """Record that a slot with this extent is reserved, or that it was in use until now."""
        now = self._clock()
        first, end = extent.start // ARENA_CHUNK_BYTES, -(-extent.end // ARENA_CHUNK_BYTES)
        self._used_at |= dict.fromkeys(range(first, end), now)

    def take(self, free: Iterable[Extent]) -> Extent | None:
        """Take a chunk whose pages the caller releases; it is inside one of the `free` extents."""
        before = self._clock() - self._idle_seconds
        idle = {chunk for chunk, used_at in self._used_at.items() if used_at <= before}
        for extent in free if idle else ():
            for chunk in idle:
                start = chunk * ARENA_CHUNK_BYTES
                end = min(start + ARENA_CHUNK_BYTES, self._capacity_bytes)
                if extent.start <= start and end <= extent.end:
                    del self._used_at[chunk]
                    return Extent(start, end)
        return None
