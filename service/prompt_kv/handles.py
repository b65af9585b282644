"""Handles: unguessable names of sealed slots, readable by their owner while the lease is active.

A handle belongs to the API key that requested it and is 404 for every other key. The most recent
ended handles are remembered, so that their owner gets 410 instead of 404.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from service.cluster.ids import new_handle_id
from service.http.errors import KvGone, KvNotFound
from service.prompt_kv.download_pin import DownloadPin
from service.prompt_kv.leases import Leases
from service.prompt_kv.slots import Slot, SlotTable

MAX_RELEASED_REMEMBERED = 16_384


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Handle:
    """Handle of one group. Groups that share a slot have separate handles."""

    id: str
    owner: str
    slot: Slot
    lease_seconds: float


class Handles:
    """Table of handles. A handle holds its slot from `grant` until its lease ends or `release`."""

    def __init__(self, slots: SlotTable, leases: Leases, *, replica_id: str) -> None:
        self._slots = slots
        self._leases = leases
        self._replica_id = replica_id
        self._handles: dict[str, Handle] = {}
        self._released: OrderedDict[str, str] = OrderedDict()
        self._readings: set[DownloadPin] = set()

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[Handle]:
        return iter(self._handles.values())

    def grant(self, owner: str, slot: Slot, lease_seconds: float) -> Handle:
        """Create a handle whose lease is held: it does not expire before `begin`."""
        handle = Handle(
            id=new_handle_id(self._replica_id),
            owner=owner,
            slot=slot,
            lease_seconds=self._leases.clamp_seconds(lease_seconds),
        )
        self._slots.hold(slot)
        self._leases.hold(handle.id)
        self._handles[handle.id] = handle
        return handle

    def begin(self, handle: Handle) -> None:
        self._leases.begin(handle.id, handle.lease_seconds)

    def get(self, handle_id: str, owner: str) -> Handle:
        """Raises KvGone or KvNotFound."""
        handle = self._handles.get(handle_id)
        if handle is not None and not self._leases.is_active(handle_id):
            self._drop(handle, expired=True)
            handle = None
        if handle is None and self._released.get(handle_id) == owner:
            raise KvGone()
        if handle is None or handle.owner != owner:
            raise KvNotFound()
        return handle

    def remaining_seconds(self, handle: Handle) -> float:
        return self._leases.remaining_seconds(handle.id) or 0.0

    def has_begun(self, handle: Handle) -> bool:
        """Return True once the lease has started; before that the handle is held."""
        return self._leases.has_begun(handle.id)

    def expiry_key(self, handle: Handle) -> tuple[bool, float]:
        """Sort key: started leases by remaining time, then held handles."""
        return not self.has_begun(handle), self.remaining_seconds(handle)

    def renew(self, handle: Handle, seconds: float) -> float:
        """Renew the lease and return its remaining seconds. Call `get` first, without an await."""
        left = self._leases.renew(handle.id, seconds)
        assert left is not None, "a lease that was alive just now cannot be over"
        return left

    def release(self, handle_id: str, owner: str) -> None:
        """Release a handle. No effect if its lease is already over."""
        try:
            handle = self.get(handle_id, owner)
        except KvGone:
            return
        self._drop(handle, expired=False)

    def end(self, handle: Handle) -> None:
        """Release a handle on behalf of its owner, who may have released it already."""
        if handle.id in self._handles:
            self._drop(handle, expired=False)

    @contextmanager
    def reading(self, handle: Handle) -> Iterator[DownloadPin]:
        """Pin the slot for a download; its bytes are unchanged until the lease ends."""
        reading = DownloadPin(handle.slot, self._slots, self._leases, handle.id)
        self._readings.add(reading)
        try:
            yield reading
        finally:
            self._readings.discard(reading)
            reading.close()

    def sweep(self) -> None:
        for reading in self._readings:
            reading.sweep()
        for handle_id in self._leases.expired():
            self._drop(self._handles[handle_id], expired=True)

    def check(self) -> None:
        """Assert that each handle has one lease and that slots count their handles correctly."""
        assert len(self._leases) == len(self._handles), "a lease without a handle, or without one"
        for slot in {handle.slot for handle in self._handles.values()}:
            mine = sum(handle.slot is slot for handle in self._handles.values())
            assert slot.num_handles == mine, "a slot has lost count of its handles"

    def _drop(self, handle: Handle, *, expired: bool) -> None:
        del self._handles[handle.id]
        self._leases.end(handle.id)
        self._slots.drop(handle.slot, expired=expired)
        self._released[handle.id] = handle.owner
        while len(self._released) > MAX_RELEASED_REMEMBERED:
            self._released.popitem(last=False)
