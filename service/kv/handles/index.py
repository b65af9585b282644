"""Index of exported prompt KV by handle, and by prompt so that groups share one export.

Handles are unguessable ids of entries, which their owner can read during a lease. A handle belongs
to the API key that requested it and is 404 for every other key. The most recent ended handles are
remembered, so that their owner gets 410 instead of 404.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from service.cluster.registry import new_handle_id
from service.config.prompt_kv import KvSettings
from service.errors import KvGone, KvNotFound
from service.kv.handles.file_layout import Layout
from service.kv.handles.handle import MAX_LEASES, DownloadPin, Handle, PromptEntry
from service.kv.store import KvStore

MAX_RELEASED_REMEMBERED = 16_384
GRACE_SECONDS = 5.0
"""Time for which KV is kept after a lease of it has expired.

A shared-memory or NIXL read, which the server cannot see, copies several GiB in it.
"""


class HandleIndex:
    """Index of the prompt entries of a store; nothing is evicted before its handles have ended."""

    def __init__(
        self,
        store: KvStore,
        settings: KvSettings,
        *,
        replica_id: str,
        clock: Callable[[], float],
        max_leases: int = MAX_LEASES,
    ) -> None:
        self._store = store
        self._settings = settings
        self._replica_id = replica_id
        self._clock = clock
        self._max_leases = max_leases
        self._shared: dict[tuple[str, str, str], PromptEntry] = {}
        self._handles: dict[str, Handle] = {}
        self._released: OrderedDict[str, str] = OrderedDict()
        self._pins: set[DownloadPin] = set()

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[Handle]:
        return iter(self._handles.values())

    def find(self, owner: str, layout: Layout) -> PromptEntry | None:
        """Entry of an owner's prompt, reserved or committed, that a further group can share."""
        return self._shared.get(_key(owner, layout))

    def reserve(self, owner: str, layout: Layout, *, gpu_bytes: int = 0) -> PromptEntry | None:
        """Reserve an entry for a prompt; None if the arena has no space."""
        entry = self._store.reserve(
            partial(PromptEntry, owner=owner, layout=layout),
            layout.num_tokens,
            layout.data_bytes,
            header_bytes=layout.header_bytes,
            gpu_bytes=gpu_bytes,
        )
        if entry is not None:
            self._shared[_key(owner, layout)] = entry
        return entry

    def relabel(self, entry: PromptEntry, version: str) -> None:
        """Assign an entry that is not written yet to another weights version."""
        self._unshare(entry)
        entry.layout = replace(entry.layout, version=version)
        self._shared.setdefault(_key(entry.owner, entry.layout), entry)

    def evict(self, entry: PromptEntry) -> None:
        """Evict an entry without handles; further groups do not find it."""
        self._unshare(entry)
        self._store.evict(entry)

    def grant(self, owner: str, entry: PromptEntry, lease_seconds: float) -> Handle:
        """Create a handle for an entry; its lease does not expire before `start_lease`."""
        assert entry.is_committed and not entry.is_evicted, "only committed entries have handles"
        handle = Handle(
            new_handle_id(self._replica_id),
            owner,
            entry,
            lease_seconds,
            settings=self._settings,
            clock=self._clock,
            max_leases=self._max_leases,
        )
        entry.num_handles += 1
        self._handles[handle.id] = handle
        return handle

    @property
    def num_downloads(self) -> int:
        """Number of downloads that pin an entry."""
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
        """Context manager that pins the entry of a handle during a download; see DownloadPin."""
        pin = DownloadPin(handle, self._store)
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
        self._store.sweep()

    def check(self) -> None:
        """Assert that every entry's number of handles is correct, and no evicted entry is found."""
        for entry in {handle.entry for handle in self}:
            num_handles = sum(handle.entry is entry for handle in self)
            assert entry.num_handles == num_handles, "an entry's handles are miscounted"
            assert entry.is_committed and not entry.is_evicted, "an evicted entry has handles"
        assert not any(entry.is_evicted for entry in self._shared.values())

    def _drop(self, handle: Handle, *, expired: bool) -> None:
        del self._handles[handle.id]
        handle.end_lease()
        entry = handle.entry
        entry.num_handles -= 1
        if expired:
            self._store.keep_for(entry, GRACE_SECONDS)
        if not entry.num_handles:
            self.evict(entry)
        self._released[handle.id] = handle.owner
        while len(self._released) > MAX_RELEASED_REMEMBERED:
            self._released.popitem(last=False)

    def _unshare(self, entry: PromptEntry) -> None:
        key = _key(entry.owner, entry.layout)
        if self._shared.get(key) is entry:
            del self._shared[key]


def _key(owner: str, layout: Layout) -> tuple[str, str, str]:
    return owner, layout.version, layout.tokens_sha256
