"""Handles: unguessable ids of exported prompt KV, which their owner can read during a lease.

A handle belongs to the API key that requested it and is 404 for every other key. The most recent
ended handles are remembered, so that their owner gets 410 instead of 404.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.cluster.registry import new_handle_id
from service.config.prompt_kv import KvSettings
from service.errors import KvGone, KvNotFound
from service.kv.handles.handle import MAX_LEASES, DownloadPin, Handle
from service.kv.store import Slot, SlotTable

MAX_RELEASED_REMEMBERED = 16_384


class Handles:
    """Table of prompt-KV handles; a handle holds its slot until its lease ends or its release."""

    def __init__(
        self,
        slots: SlotTable,
        settings: KvSettings,
        *,
        replica_id: str,
        clock: Callable[[], float],
        max_leases: int = MAX_LEASES,
    ) -> None:
        self._slots = slots
        self._settings = settings
        self._replica_id = replica_id
        self._clock = clock
        self._max_leases = max_leases
        self._handles: dict[str, Handle] = {}
        self._released: OrderedDict[str, str] = OrderedDict()
        self._pins: set[DownloadPin] = set()

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[Handle]:
        return iter(self._handles.values())

    def grant(self, owner: str, slot: Slot, lease_seconds: float) -> Handle:
        """Create a handle for a slot; its lease does not expire before `start_lease`."""
        handle = Handle(
            new_handle_id(self._replica_id),
            owner,
            slot,
            lease_seconds,
            settings=self._settings,
            clock=self._clock,
            max_leases=self._max_leases,
        )
        self._slots.hold(slot)
        self._handles[handle.id] = handle
        return handle

    @property
    def num_downloads(self) -> int:
        """Number of downloads that pin a slot."""
        return sum(pin.is_open for pin in self._pins)

    def get(self, handle_id: str, owner: str) -> Handle:
        """Find an owner's handle; raises KvGone if its lease has ended, KvNotFound if unknown."""
        handle = self._handles.get(handle_id)
        if handle is not None and not handle.is_active:
            self._drop(handle, expired=True)
            handle = None
        if handle is None and self._released.get(handle_id) == owner:
            raise KvGone()
        if handle is None or handle.owner != owner:
            raise KvNotFound()
        return handle

    def release(self, handle_id: str, owner: str) -> None:
        """Release an owner's handle; no effect if its lease is already over."""
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
    def pinned(self, handle: Handle) -> Iterator[DownloadPin]:
        """Context manager that pins the slot of a handle during a download; see DownloadPin."""
        pin = DownloadPin(handle, self._slots)
        self._pins.add(pin)
        try:
            yield pin
        finally:
            self._pins.discard(pin)
            pin.close()

    def sweep(self) -> None:
        """Release expired pins and handles, by a linear scan because renewals change the order."""
        for pin in self._pins:
            pin.sweep()
        for handle in [handle for handle in self if not handle.is_active]:
            self._drop(handle, expired=True)

    def check(self) -> None:
        """Assert that every slot's number of handles is correct."""
        for slot in {handle.slot for handle in self}:
            num_handles = sum(handle.slot is slot for handle in self)
            assert slot.num_handles == num_handles, "a slot's handles are miscounted"

    def _drop(self, handle: Handle, *, expired: bool) -> None:
        del self._handles[handle.id]
        handle.end_lease()
        self._slots.drop(handle.slot, expired=expired)
        self._released[handle.id] = handle.owner
        while len(self._released) > MAX_RELEASED_REMEMBERED:
            self._released.popitem(last=False)
