"""Who may still read, and for how long.

A lease is a duration, measured here by a monotonic clock: two clocks never meet. It can be
renewed, never shortened, never beyond a whole lifetime, and never once it is over. What is held
does not run out: nobody has been told of it yet.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class _Lease:
    """No deadline: held."""

    deadline: float | None = None
    max_deadline: float = 0.0


class Leases:
    """By the handles' ids."""

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
        """What is given to who asks for so many."""
        return min(seconds, self._max_seconds)

    def hold(self, handle: str) -> None:
        assert handle not in self._leases, "a handle has one lease"
        self._leases[handle] = _Lease()

    def begin(self, handle: str, seconds: float) -> None:
        """It runs from now. Ended leases, and those that run, are left as they are."""
        lease = self._leases.get(handle)
        if lease is not None and lease.deadline is None:
            now = self._clock()
            lease.max_deadline = now + self._max_lifetime_seconds
            lease.deadline = min(now + self.clamp_seconds(seconds), lease.max_deadline)

    def renew(self, handle: str, seconds: float) -> float | None:
        """How long it now runs; None if it is over."""
        if not self.is_active(handle):
            return None
        lease = self._leases[handle]
        if lease.deadline is not None:
            wanted = self._clock() + self.clamp_seconds(seconds)
            lease.deadline = max(lease.deadline, min(wanted, lease.max_deadline))
        return self.remaining_seconds(handle)

    def remaining_seconds(self, handle: str) -> float | None:
        """Seconds; of what is held, as many as it will at most begin with. None: it is over."""
        lease = self._leases.get(handle)
        if lease is None:
            return None
        if lease.deadline is None:
            return self._max_seconds
        left = lease.deadline - self._clock()
        return left if left > 0 else None

    def deadline(self, handle: str) -> float | None:
        """When it ends; of what is held, the latest end that it can begin with. None: it is over,
        or was never granted."""
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
        """Again changes nothing."""
        self._leases.pop(handle, None)

    def expired(self) -> list[str]:
        """All that have run out. Every one is looked at: renewals leave no order."""
        return [handle for handle in self._leases if not self.is_active(handle)]
