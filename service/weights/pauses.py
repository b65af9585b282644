"""Pauses of sampling, with leases: a caller that died does not stop sampling for ever.

Each API key has at most one pause, which only the same key resumes. So the pause of an operator is
not ended by a trainer, and a trainer's is not by another one. While the engine sleeps, the sleep is
a further pause of the key that has requested it.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

PauseKind = Literal["pause", "sleep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A pause of one API key. Without `ends_at` only a resume ends it."""

    owner: str
    kind: PauseKind
    ends_at: float | None


class Pauses:
    """Table of the pauses in force; all methods are synchronous, on one event loop.

    A pause whose lease has ended counts until `end` removes it, so that the table always agrees
    with the engine.
    """

    def __init__(
        self, max_lease_seconds: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_lease_seconds = max_lease_seconds
        self._clock = clock
        self._pauses: dict[tuple[str, PauseKind], Pause] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        return len(self._pauses)

    def start(self, owner: str, lease_seconds: float | None, *, kind: PauseKind = "pause") -> None:
        """Start or renew the pause of an API key; longer leases are shortened to the maximum."""
        ends_at = None
        if lease_seconds is not None:
            ends_at = self._clock() + min(lease_seconds, self._max_lease_seconds)
        self._pauses[owner, kind] = Pause(owner=owner, kind=kind, ends_at=ends_at)
        self._changed.set()

    def end(self, owner: str, kind: PauseKind = "pause") -> None:
        self._pauses.pop((owner, kind), None)
        self._changed.set()

    def end_all(self, kind: PauseKind = "pause") -> None:
        self._pauses = {key: pause for key, pause in self._pauses.items() if pause.kind != kind}
        self._changed.set()

    def has(self, owner: str, kind: PauseKind) -> bool:
        return (owner, kind) in self._pauses

    def has_other(self, owner: str, kind: PauseKind) -> bool:
        """True if there is a pause besides this one."""
        return bool(self._pauses.keys() - {(owner, kind)})

    def ended(self) -> list[Pause]:
        """Pauses whose leases have ended."""
        now = self._clock()
        return [p for p in self._pauses.values() if p.ends_at is not None and p.ends_at <= now]

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last lease ends; None without a pause, or if one has no lease."""
        ends = [pause.ends_at for pause in self._pauses.values()]
        leases = [end for end in ends if end is not None]
        if not leases or len(leases) < len(ends):
            return None
        return max(0.0, max(leases) - self._clock())

    async def wait_until_one_ends(self) -> None:
        """Return once the lease of a pause in the table has ended."""
        while (seconds := self._seconds_to_next_end()) is None or seconds > 0:
            await self._wait_for_change(seconds)

    async def wait_until_ended(self, owner: str, kind: PauseKind) -> None:
        """Return once a pause was ended, or its lease has."""
        while (pause := self._pauses.get((owner, kind))) is not None:
            seconds = None if pause.ends_at is None else pause.ends_at - self._clock()
            if seconds is not None and seconds <= 0:
                return
            await self._wait_for_change(seconds)

    async def _wait_for_change(self, timeout_seconds: float | None) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait()

    def _seconds_to_next_end(self) -> float | None:
        leases = [p.ends_at for p in self._pauses.values() if p.ends_at is not None]
        return min(leases) - self._clock() if leases else None
