"""Handles: unguessable ids of exported prompt KV, which their owner can read during a lease.

A handle belongs to the API key that requested it and is 404 for every other key. The most recent
ended handles are remembered, so that their owner gets 410 instead of 404, and the most recent moved
ones, so that their owner is redirected to the replica that has received them.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from service.cluster.membership import RedirectToReplica
from service.cluster.registry import new_handle_id
from service.http.errors import KvGone, KvNotFound
from service.prompt_kv.handle import DownloadPin, Handle
from service.prompt_kv.settings import KvSettings
from service.prompt_kv.slots import Slot, SlotTable

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
    ) -> None:
        self._slots = slots
        self._settings = settings
        self._replica_id = replica_id
        self._clock = clock
        self._handles: dict[str, Handle] = {}
        self._released: OrderedDict[str, str] = OrderedDict()
        self._moved: OrderedDict[str, tuple[str, str]] = OrderedDict()
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
            min(lease_seconds, self._settings.max_lease_seconds),
            settings=self._settings,
            clock=self._clock,
        )
        self._slots.hold(slot)
        self._handles[handle.id] = handle
        return handle

    def receive(
        self,
        handle_id: str,
        owner: str,
        slot: Slot,
        *,
        lease_seconds: float,
        lifetime_seconds: float,
        source: str,
        on_end: Callable[[], None],
    ) -> Handle:
        """Add a handle that the replica `source` has sent, which arrives; start its lease."""
        assert handle_id not in self._handles, "a handle is moved here once"
        handle = Handle(
            handle_id,
            owner,
            slot,
            lease_seconds,
            settings=self._settings,
            clock=self._clock,
            source=source,
            on_end=on_end,
        )
        handle.is_arriving = True
        self._forget(handle_id)
        self._slots.hold(slot)
        self._handles[handle_id] = handle
        handle.start_lease(lifetime_seconds)
        return handle

    def return_to_source(self, handle: Handle) -> None:
        """Remove a received handle, which is still on its source. No effect if it is not here."""
        if self._handles.get(handle.id) is handle:
            self._drop(handle, expired=False)
            self._forget(handle.id)

    def on_moved(self, handle: Handle, url: str) -> None:
        """Remove a handle that another replica has received, and redirect its owner there.

        Its lease may have ended meanwhile. Downloads in progress continue until then.
        """
        if handle.id in self._handles:
            self._slots.retain(handle.slot)
            self.end(handle)
        self._forget(handle.id)
        self._moved[handle.id] = handle.owner, url
        while len(self._moved) > MAX_RELEASED_REMEMBERED:
            self._moved.popitem(last=False)

    def find(self, handle_id: str) -> Handle | None:
        """A handle of any owner; None if it has ended or is not here."""
        handle = self._handles.get(handle_id)
        if handle is not None and not handle.is_active:
            self._drop(handle, expired=True)
            return None
        return handle

    def is_known(self, handle_id: str) -> bool:
        """True if a handle is here, or was here recently."""
        return any(handle_id in each for each in (self._handles, self._released, self._moved))

    def check_here(self, handle_id: str, owner: str) -> None:
        """Raise RedirectToReplica if another replica has received an owner's handle."""
        moved = self._moved.get(handle_id)
        if moved is not None and moved[0] == owner:
            raise RedirectToReplica(moved[1])

    async def until_settled(self, handle_id: str) -> None:
        """Wait until the handle is not being moved: its lease and its end would be lost."""
        while handle := self._handles.get(handle_id):
            if handle.move_ended is None:
                return
            await handle.move_ended.wait()

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
        handle.on_end()
        self._slots.drop(handle.slot, expired=expired)
        self._released[handle.id] = handle.owner
        while len(self._released) > MAX_RELEASED_REMEMBERED:
            self._released.popitem(last=False)

    def _forget(self, handle_id: str) -> None:
        self._released.pop(handle_id, None)
        self._moved.pop(handle_id, None)
