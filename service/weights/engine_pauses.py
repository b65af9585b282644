"""Pauses of sampling by API keys, and the pause state of the engine, which agrees with them.

vLLM has one pause state for all callers. The modes `wait` and `abort` set the one in which running
samples continue, so they would run the samples that another pause has frozen.
"""

import asyncio
from typing import Final

from engine.protocol.weights import Weights
from engine.types.samples import PauseMode
from service.errors import VersionConflict
from service.weights.idle_wait import IdleWait
from service.weights.pauses import PauseKind, Pauses

COMPLETION_SECONDS: Final = 1.0
"""Time for rollouts to become idle after a pause in mode `wait` or `abort` has ended samples."""


class EnginePauses:
    """Pauses and resumes the engine for API keys, for sleeps and for weights updates.

    Whoever changes the engine's state or weights holds `lock`.
    """

    def __init__(self, engine: Weights, table: Pauses, idle_wait: IdleWait) -> None:
        self.lock = asyncio.Lock()
        self.table = table
        self._engine = engine
        self._idle_wait = idle_wait
        self._draining: tuple[str, PauseKind] | None = None

    @property
    def paused(self) -> bool:
        return len(self.table) > 0

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the last lease ends; None without a pause, or if one has no lease."""
        return self.table.seconds_left

    async def pause(self, owner: str, mode: PauseMode, lease_seconds: float | None) -> None:
        """Start or renew the pause of an API key; None: without a lease."""
        self.renew(owner, "pause", lease_seconds)
        async with self.lock:
            await self.start(owner, "pause", mode, lease_seconds)

    async def resume(self, owner: str, *, is_for_all: bool = False) -> None:
        """End the pause of an API key, or of all; sampling resumes with the end of the last one.

        This also ends a pause in mode `wait` whose samples still run, and which holds the lock.
        """
        self.end("pause", None if is_for_all else owner)
        async with self.lock:
            self.end("pause", None if is_for_all else owner)
            await self.resume_unless_paused()

    def end(self, kind: PauseKind, owner: str | None) -> None:
        """Remove the pause of an API key, or of all, from the table."""
        if owner is None:
            self.table.end_all(kind)
        else:
            self.table.end(owner, kind)

    def renew(self, owner: str, kind: PauseKind, lease_seconds: float | None) -> None:
        """Renew the lease of a pause in mode `wait` while its samples still run."""
        if self._draining == (owner, kind):
            self.table.start(owner, lease_seconds, kind=kind)

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
        self.table.start(owner, lease_seconds, kind=kind)
        # The modes `wait` and `abort` end running samples, but freeze those that start afterwards,
        # such as the next ones of a rollout whose first samples have ended.
        self._idle_wait.wake_after(0.0 if mode == "keep" else COMPLETION_SECONDS)

    async def pause_engine(self, mode: PauseMode, *, recompute: bool = False) -> None:
        """Pause the engine for a change, which other pauses outlast."""
        await self._engine.pause(mode, recompute=recompute)
        if mode == "abort" and len(self.table):
            await self._engine.pause("keep")

    async def resume_unless_paused(self) -> None:
        if not len(self.table):
            await self._engine.resume()

    async def _drain(self, owner: str, kind: PauseKind, lease_seconds: float | None) -> None:
        if self.table.has_other(owner, "pause"):
            raise VersionConflict(
                "another API key pauses sampling, or the engine sleeps: mode wait would run frozen "
                "samples"
            )
        self.table.start(owner, lease_seconds, kind=kind)
        self._draining = owner, kind
        try:
            is_drained = await self._pause_until_idle(owner, kind)
        finally:
            self._draining = None
        if not is_drained:
            await self._engine.pause("keep")  # whoever ended the pause resumes, once it may
            raise VersionConflict(f"the {kind} has ended before the running samples did")

    async def _pause_until_idle(self, owner: str, kind: PauseKind) -> bool:
        """Pause in mode `wait`; returns False if the pause ends before the running samples."""
        draining = asyncio.ensure_future(self._engine.pause("wait"))
        ended = asyncio.ensure_future(self.table.wait_until_ended(owner, kind))
        try:
            await asyncio.wait({draining, ended}, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                draining.result()
            return draining.done()
        finally:
            draining.cancel()
            ended.cancel()
            await asyncio.gather(draining, ended, return_exceptions=True)
