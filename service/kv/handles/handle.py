"""Handle by which a caller reads exported prompt KV, with its lease and running downloads.

A lease is a duration measured by the server's monotonic clock; clocks of different hosts are never
compared. It can be renewed up to a maximum lifetime. It is never shortened, and never revived once
it has ended. Until it starts it does not expire, because its caller does not have the handle yet.
"""

from collections.abc import Callable
from dataclasses import dataclass

from service.config.prompt_kv import KvSettings
from service.kv.arena import PAGE_BYTES
from service.kv.handles.file_layout import Layout
from service.kv.store import Entry, KvStore

MAX_LEASES = 60
"""Longest lifetime of a handle, in leases of the maximum duration.

A caller that hangs while it renews its lease does not keep the memory for ever.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class PromptEntry(Entry):
    """KV file of one prompt, which groups of one owner with this prompt share."""

    owner: str
    layout: Layout
    etag: str = ""
    num_handles: int = 0

    @property
    def file_offset(self) -> int:
        return self.extent.start + PAGE_BYTES


class Handle:
    """Handle by which one API key reads one entry, with the lease on it.

    Groups that share an entry have separate handles.
    """

    def __init__(
        self,
        handle_id: str,
        owner: str,
        entry: PromptEntry,
        lease_seconds: float,
        *,
        settings: KvSettings,
        max_leases: int,
        clock: Callable[[], float],
    ) -> None:
        self.id = handle_id
        self.owner = owner
        self.entry = entry
        self._settings = settings
        self._max_leases = max_leases
        self._clock = clock
        self.lease_seconds = self._clamp(lease_seconds)
        self._max_deadline = 0.0
        self._deadline: float | None = None
        self._has_ended = False

    def start_lease(self) -> None:
        """Start the lease now. No effect if it has started or ended."""
        if self._deadline is None:
            now = self._clock()
            self._max_deadline = now + self._max_leases * self._settings.max_lease_seconds
            self._deadline = min(now + self.lease_seconds, self._max_deadline)

    def renew(self, lease_seconds: float) -> float:
        """Renew the lease and return its remaining seconds, 0 if it has ended."""
        if self.is_active and self._deadline is not None:
            wanted = min(self._clock() + self._clamp(lease_seconds), self._max_deadline)
            self._deadline = max(self._deadline, wanted)
        return self.remaining_seconds

    def end_lease(self) -> None:
        """End the lease; the last deadline is kept for downloads in progress."""
        self._deadline = self.deadline
        self._has_ended = True

    @property
    def has_started(self) -> bool:
        return self._deadline is not None

    @property
    def is_active(self) -> bool:
        return self.remaining_seconds > 0

    @property
    def remaining_seconds(self) -> float:
        """Remaining seconds of the lease; before its start, the maximum lease duration."""
        if self._has_ended:
            return 0.0
        if self._deadline is None:
            return self._settings.max_lease_seconds
        return max(0.0, self._deadline - self._clock())

    @property
    def deadline(self) -> float:
        """Time at which the lease ends; before its start, now plus the maximum lease duration."""
        if self._deadline is None:
            return self._clock() + self._settings.max_lease_seconds
        return self._deadline

    @property
    def is_past_deadline(self) -> bool:
        return self.deadline <= self._clock()

    def _clamp(self, lease_seconds: float) -> float:
        return min(lease_seconds, self._settings.max_lease_seconds)


class DownloadPin:
    """Pin of one download, which keeps an entry's bytes unchanged until the lease ends.

    Renewals of the lease extend it. After a release of the handle the last deadline still applies,
    so a download in progress can complete. Call `sweep` before each read of the bytes.
    """

    def __init__(self, handle: Handle, store: KvStore) -> None:
        assert handle.entry.is_committed, "only committed entries are read"
        self._handle = handle
        self._store = store
        self.is_open = True
        store.pin(handle.entry)

    def sweep(self) -> None:
        """Release the pin if the lease's deadline has passed."""
        if self._handle.is_past_deadline:
            self.close()

    def close(self) -> None:
        """Release the pin; further calls have no effect."""
        if self.is_open:
            self.is_open = False
            self._store.unpin(self._handle.entry)
