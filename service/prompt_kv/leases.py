"""Leases of KV handles.

A lease is a duration measured by the server's monotonic clock; clocks of different hosts are never
compared. It can be renewed up to a maximum lifetime. It is never shortened, and never revived once
it has ended. A held lease does not expire, because its caller does not have the handle yet.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class _Lease:
    """State of one lease. A `deadline` of None means held."""

    deadline: float | None = None
    max_deadline: float = 0.0


class Leases:
    """Leases by handle id."""

    def __init__(
        self,
        *,
        max_seconds: float,
        max_lifetime_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._max_seconds = max_seconds
        self._max_lifetime_seconds = max_lifetime_seconds
        self._clock = clock
        self._leases: dict[str, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def clamp_seconds(self, seconds: float) -> float:
        """Duration granted for a requested one."""
        return min(seconds, self._max_seconds)

    def hold(self, handle: str) -> None:
        assert handle not in self._leases, "a handle has one lease"
        self._leases[handle] = _Lease()

    def begin(self, handle: str, seconds: float) -> None:
        """Start a held lease now. No effect on ended or started leases."""
        lease = self._leases.get(handle)
        if lease is not None and lease.deadline is None:
            now = self._clock()
            lease.max_deadline = now + self._max_lifetime_seconds
            lease.deadline = min(now + self.clamp_seconds(seconds), lease.max_deadline)

    def renew(self, handle: str, seconds: float) -> float | None:
        """Renew the lease and return its remaining seconds; None if it has ended."""
        if not self.is_active(handle):
            return None
        lease = self._leases[handle]
        if lease.deadline is not None:
            wanted = self._clock() + self.clamp_seconds(seconds)
            lease.deadline = max(lease.deadline, min(wanted, lease.max_deadline))
        return self.remaining_seconds(handle)

    def remaining_seconds(self, handle: str) -> float | None:
        """Remaining seconds; for a held lease the longest initial duration. None if it ended."""
        lease = self._leases.get(handle)
        if lease is None:
            return None
        if lease.deadline is None:
            return self._max_seconds
        left = lease.deadline - self._clock()
        return left if left > 0 else None

    def deadline(self, handle: str) -> float | None:
        """Time at which the lease ends, on the leases' clock.

        For a held lease, the latest end if it were started now. None if the lease has ended or
        never existed.
        """
        left = self.remaining_seconds(handle)
        return None if left is None else self._clock() + left

    def is_past(self, deadline: float | None) -> bool:
        return deadline is None or deadline <= self._clock()

    def has_begun(self, handle: str) -> bool:
        lease = self._leases.get(handle)
        return lease is not None and lease.deadline is not None

    def is_active(self, handle: str) -> bool:
        return self.remaining_seconds(handle) is not None

    def end(self, handle: str) -> None:
        """End a lease. Idempotent."""
        self._leases.pop(handle, None)

    def expired(self) -> list[str]:
        """Handles whose leases have expired. A linear scan: renewals destroy any order."""
        return [handle for handle in self._leases if not self.is_active(handle)]
