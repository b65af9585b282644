"""Slots of the prompt-KV arena; free + reserved + leased + quarantined bytes = capacity.

    reserved       the engine may write it; nobody reads it
    leased         written and sealed; holders of a handle may read it
    quarantined    no new reads, but a write or a read may still be in progress
    free           after quarantine: no pins, no more engine writes, grace period over

Groups of one owner with the same prompt under the same weights version share a slot. Not
thread-safe: all methods run on one event loop. The clock is monotonic.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from service.kv.arena import PAGE_BYTES, Extent, ExtentAllocator
from service.kv.handles.file_layout import Layout

GRACE_SECONDS = 5.0
"""Time for which KV is kept after its lease has expired.

A reader that maps the memory copies several GiB in it.
"""


class SlotState(Enum):
    RESERVED = "reserved"
    LEASED = "leased"
    QUARANTINED = "quarantined"


_TRANSITIONS = {
    (SlotState.RESERVED, SlotState.LEASED),
    (SlotState.RESERVED, SlotState.QUARANTINED),
    (SlotState.LEASED, SlotState.QUARANTINED),
}


class _SlotKey(NamedTuple):
    owner: str
    version: str
    tokens_sha256: str


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """Arena memory for the KV of one prompt, changed only by `SlotTable`.

    `pins` counts the downloads in progress. `gpu_extent` is the slot's part of the ranks' GPU
    memory, if it has one.
    """

    owner: str
    layout: Layout
    extent: Extent
    gpu_extent: Extent | None = None
    state: SlotState = SlotState.RESERVED
    etag: str = ""
    num_handles: int = 0
    pins: int = 0
    free_at: float = -math.inf

    @property
    def status_offset(self) -> int:
        return self.extent.start

    @property
    def file_offset(self) -> int:
        return self.extent.start + PAGE_BYTES

    @property
    def data_offset(self) -> int:
        return self.file_offset + self.layout.header_bytes

    @property
    def key(self) -> _SlotKey:
        return _SlotKey(self.owner, self.layout.version, self.layout.tokens_sha256)


class SlotTable:
    """Table of all slots, which alone allocates and frees the bytes of the prompt-KV arena."""

    def __init__(
        self,
        capacity_bytes: int,
        *,
        clock: Callable[[], float],
        gpu_bytes: int = 0,
    ) -> None:
        self._gpu_extents = ExtentAllocator(gpu_bytes // PAGE_BYTES * PAGE_BYTES)
        self._extents = ExtentAllocator(capacity_bytes)
        self._clock = clock
        self._slots: set[Slot] = set()
        self._shared: dict[_SlotKey, Slot] = {}
        self._num_bytes = dict.fromkeys(SlotState, 0)

    @property
    def free_bytes(self) -> int:
        return self._extents.free_bytes

    def num_bytes(self, state: SlotState) -> int:
        return self._num_bytes[state]

    def find(self, owner: str, version: str, tokens_sha256: str) -> Slot | None:
        """Reserved or leased slot of an owner's prompt that a further group can share, or None."""
        return self._shared.get(_SlotKey(owner, version, tokens_sha256))

    @property
    def gpu_capacity_bytes(self) -> int:
        return self._gpu_extents.capacity_bytes

    @property
    def gpu_free_bytes(self) -> int:
        return self._gpu_extents.free_bytes

    def reserve(self, owner: str, layout: Layout, *, gpu_bytes: int = 0) -> Slot | None:
        """Reserve a slot for a prompt; None if the arena has no space even after a sweep.

        With `gpu_bytes` it also gets a part of the ranks' GPU memory, if there is space.
        """
        self.sweep()
        extent = self._extents.allocate(layout.slot_bytes)
        if extent is None:
            return None
        gpu_extent = self._gpu_extents.allocate(gpu_bytes) if gpu_bytes else None
        slot = Slot(owner=owner, layout=layout, extent=extent, gpu_extent=gpu_extent)
        self._slots.add(slot)
        self._num_bytes[SlotState.RESERVED] += extent.num_bytes
        self._shared[slot.key] = slot
        return slot

    def relabel(self, slot: Slot, version: str) -> None:
        """Assign a slot that is not written yet to another weights version."""
        assert slot.state is SlotState.RESERVED, "only unwritten slots are relabelled"
        self._unshare(slot)
        slot.layout = replace(slot.layout, version=version)
        self._shared.setdefault(slot.key, slot)

    def seal(self, slot: Slot, etag: str) -> None:
        """Mark a slot as written; its bytes are immutable from now on."""
        slot.etag = etag
        self._set_state(slot, SlotState.LEASED)

    def hold(self, slot: Slot) -> None:
        assert slot.state is SlotState.LEASED, "only sealed slots have handles"
        slot.num_handles += 1

    def drop(self, slot: Slot, *, expired: bool) -> None:
        """Remove one handle from a slot; quarantine the slot if it was the last handle.

        If the lease `expired`, a shared-memory or NIXL read that the server cannot see may be in
        progress, so the slot is not reused for the grace period.
        """
        assert slot.num_handles > 0, "more handles dropped than held"
        slot.num_handles -= 1
        if expired:
            slot.free_at = max(slot.free_at, self._clock() + GRACE_SECONDS)
        if not slot.num_handles:
            self._quarantine(slot)

    def discard(self, slot: Slot, *, is_writable: bool = False) -> None:
        """Give up a slot without handles, and quarantine its memory before it is reused.

        If it `is_writable`, the engine may still write to it, so it stays quarantined until
        `allow_reuse`.
        """
        slot.free_at = math.inf if is_writable else slot.free_at
        self._quarantine(slot)

    def allow_reuse(self, slot: Slot) -> None:
        """Allow the reuse of a discarded slot, because the engine no longer writes to it."""
        assert slot.state is SlotState.QUARANTINED, "only discarded slots are reusable"
        slot.free_at = self._clock()
        self.sweep()

    def pin(self, slot: Slot) -> None:
        assert slot.state is SlotState.LEASED, "only sealed slots can be read"
        slot.pins += 1

    def unpin(self, slot: Slot) -> None:
        assert slot.pins > 0, "unpinned more often than pinned"
        slot.pins -= 1
        self.sweep()

    def sweep(self) -> None:
        """Free reusable quarantined slots, by a linear scan because the deadlines are unordered."""
        now = self._clock()
        quarantined = [slot for slot in self._slots if slot.state is SlotState.QUARANTINED]
        for slot in quarantined:
            if not slot.pins and slot.free_at <= now:
                self._slots.remove(slot)
                self._num_bytes[SlotState.QUARANTINED] -= slot.extent.num_bytes
                self._extents.release(slot.extent)
                if slot.gpu_extent is not None:
                    self._gpu_extents.release(slot.gpu_extent)

    def check(self) -> None:
        """Assert that the byte counts, handle counts and shared entries are consistent."""
        self._extents.check()
        self._gpu_extents.check()
        on_gpu = sum(s.gpu_extent.num_bytes for s in self._slots if s.gpu_extent is not None)
        assert on_gpu + self.gpu_free_bytes == self._gpu_extents.capacity_bytes, "GPU memory leaks"
        for state in SlotState:
            held = sum(s.extent.num_bytes for s in self._slots if s.state is state)
            assert held == self._num_bytes[state], f"{state.value} bytes are miscounted"
        total = self.free_bytes + sum(self._num_bytes.values())
        assert total == self._extents.capacity_bytes, "states do not add up to the capacity"
        assert all(
            slot.num_handles == 0 for slot in self._slots if slot.state is not SlotState.LEASED
        )
        assert all(slot in self._slots for slot in self._shared.values()), "a freed slot is shared"

    def _quarantine(self, slot: Slot) -> None:
        self._unshare(slot)
        self._set_state(slot, SlotState.QUARANTINED)
        self.sweep()

    def _unshare(self, slot: Slot) -> None:
        if self._shared.get(slot.key) is slot:
            del self._shared[slot.key]

    def _set_state(self, slot: Slot, state: SlotState) -> None:
        assert (slot.state, state) in _TRANSITIONS, f"{slot.state} cannot become {state}"
        self._num_bytes[slot.state] -= slot.extent.num_bytes
        self._num_bytes[state] += slot.extent.num_bytes
        slot.state = state
