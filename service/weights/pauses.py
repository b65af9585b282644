"""Leased pauses of sampling, one per API key; the engine resumes when the last one ends.

Each API key has at most one pause, which only the same key resumes. So the pause of an operator is
not ended by a trainer, and a trainer's is not by another one. While the engine sleeps, the sleep is
a further pause of the key that has requested it. Pauses have leases: a caller that died does not
stop sampling for ever.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

from engine.protocol.weights import Weights
from engine.types.samples import PauseMode
from service.errors import VersionConflict

PauseKind = Literal["pause", "sleep"]
COMPLETION_SECONDS: Final = 1.0
"""Time for rollouts to become idle after a pause in mode `wait` or `abort` has ended samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A pause of one API key. Without `ends_at` only a resume ends it."""

    owner: str
    kind: PauseKind
    ends_at: float | None


class Pauses:
    """Pauses and resumes the engine for API keys, for sleeps and for weights updates.

    Code that changes the engine's state or weights holds `lock`. vLLM has one pause state for all
    callers. The modes `wait` and `abort` set the one in which running samples continue, so they
    would run the samples that another pause has frozen. A pause whose lease has ended counts until
    it is removed, so that the table of pauses always agrees with the engine. `on_paused` is called
    with the seconds after which samples that still run are frozen.
    """

    def __init__(
        self,
        engine: Weights,
        on_paused: Callable[[float], None],
        max_lease_seconds: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = asyncio.Lock()
        self._engine = engine
        self._on_paused = on_paused
        self._max_lease_seconds = max_lease_seconds
        self._clock = clock
        self._table: dict[tuple[str, PauseKind], Pause] = {}
        self._changed = asyncio.Event()
        self._draining: tuple[str, PauseKind] | None = None

    @property
    def paused(self) -> bool:
        return len(self._table) > 0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last lease ends; None without a pause, or if one has no lease."""
        ends = [pause.ends_at for pause in self._table.values()]
        leases = [end for end in ends if end is not None]
        if not leases or len(leases) < len(ends):
            return None
        return max(0.0, max(leases) - self._clock())

    async def pause(self, owner: str, mode: PauseMode, lease_seconds: float | None) -> None:
        """Start or renew the pause of an API key; None: without a lease."""
        self.renew(owner, "pause", lease_seconds)
        async with self.lock:
            await self.start(owner, "pause", mode, lease_seconds)

    async def resume(self, owner: str, *, is_for_all: bool = False) -> None:
        """End the pause of an API key, or of all; sampling resumes with the end of the last one.

        This also ends a pause in mode `wait` whose samples still run, and which holds the lock.
        """
        self.remove("pause", None if is_for_all else owner)
        async with self.lock:
            self.remove("pause", None if is_for_all else owner)
            await self.resume_unless_paused()

    def has(self, owner: str, kind: PauseKind) -> bool:
        return (owner, kind) in self._table

    def put(self, owner: str, kind: PauseKind, lease_seconds: float | None) -> None:
        """Record or renew a pause; longer leases are shortened to the maximum."""
        ends_at = None
        if lease_seconds is not None:
            ends_at = self._clock() + min(lease_seconds, self._max_lease_seconds)
        self._table[owner, kind] = Pause(owner=owner, kind=kind, ends_at=ends_at)
        self._changed.set()

    def remove(self, kind: PauseKind, owner: str | None) -> None:
        """Remove the pause of an API key, or of all, from the table."""
        for key in list(self._table):
            if key[1] == kind and (owner is None or key[0] == owner):
                del self._table[key]
        self._changed.set()

    def renew(self, owner: str, kind: PauseKind, lease_seconds: float | None) -> None:
        """Renew the lease of a pause in mode `wait` while its samples still run."""
        if self._draining == (owner, kind):
            self.put(owner, kind, lease_seconds)

    async def start(
        self,
        owner: str,
        kind: PauseKind,
        mode: PauseMode,
        lease_seconds: float | None,
        *,
        recompute: bool = False,
    ) -> None:
        """Pause the engine for a pause or a sleep, and record it; the caller holds `lock`.

        Raises VersionConflict if mode `wait` is not possible, or if the pause ends before the
        running samples do.
        """
        if mode == "wait":
            await self._drain(owner, kind, lease_seconds)
            if recompute:
                await self._engine.pause("keep", recompute=True)
        else:
            await self.pause_engine(mode, recompute=recompute)
        self.put(owner, kind, lease_seconds)
        # The modes `wait` and `abort` end running samples, but freeze those that start afterwards,
        # such as the next ones of a rollout whose first samples have ended.
        self._on_paused(0.0 if mode == "keep" else COMPLETION_SECONDS)

    async def pause_engine(self, mode: PauseMode, *, recompute: bool = False) -> None:
        """Pause the engine for a change, which other pauses outlast."""
        await self._engine.pause(mode, recompute=recompute)
        if mode == "abort" and self.paused:
            await self._engine.pause("keep")

    async def resume_unless_paused(self) -> None:
        if not self.paused:
            await self._engine.resume()

    async def _drain(self, owner: str, kind: PauseKind, lease_seconds: float | None) -> None:
        if self._table.keys() - {(owner, "pause")}:
            raise VersionConflict(
                "another API key pauses sampling, or the engine sleeps: mode wait would run frozen "
                "samples"
            )
        self.put(owner, kind, lease_seconds)
        self._draining = owner, kind
        try:
            is_drained = await self._pause_until_idle(owner, kind)
        finally:
            self._draining = None
        if not is_drained:
            await self._engine.pause("keep")  # the code that ended the pause resumes, once it may
            raise VersionConflict(f"the {kind} has ended before the running samples did")

    async def _pause_until_idle(self, owner: str, kind: PauseKind) -> bool:
        """Pause in mode `wait`; returns False if the pause ends before the running samples."""
        draining = asyncio.ensure_future(self._engine.pause("wait"))
        ended = asyncio.ensure_future(self._wait_until_ended(owner, kind))
        try:
            await asyncio.wait({draining, ended}, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                draining.result()
            return draining.done()
        finally:
            draining.cancel()
            ended.cancel()
            await asyncio.gather(draining, ended, return_exceptions=True)

    def ended(self) -> list[Pause]:
        """Pauses whose leases have ended."""
        now = self._clock()
        return [p for p in self._table.values() if p.ends_at is not None and p.ends_at <= now]

    async def wait_until_one_ends(self) -> None:
        """Return once the lease of a pause in the table has ended."""
        while not self.ended():
            leases = [p.ends_at for p in self._table.values() if p.ends_at is not None]
            await self._wait_for_change(min(leases) if leases else None)

    async def _wait_until_ended(self, owner: str, kind: PauseKind) -> None:
        """Return once a pause was removed, or its lease has ended."""
        while (pause := self._table.get((owner, kind))) is not None and pause not in self.ended():
            await self._wait_for_change(pause.ends_at)

    async def _wait_for_change(self, until: float | None) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(None if until is None else until - self._clock()):
                await self._changed.wait()
