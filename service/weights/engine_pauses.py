"""Pause state of the engine, in agreement with the table of pauses.

vLLM has one pause state for all callers. The modes `wait` and `abort` set the one in which running
samples continue, so they would run the samples that another pause has frozen.
"""

import asyncio

from engine.protocol.weights import Weights
from engine.types import PauseMode
from service.errors import VersionConflict
from service.weights.pauses import PauseKind, Pauses


class EnginePauses:
    """Pauses and resumes the engine; except for `renew`, call it one at a time."""

    def __init__(self, engine: Weights, table: Pauses) -> None:
        self._engine = engine
        self._table = table
        self._draining: tuple[str, PauseKind] | None = None

    def renew(self, owner: str, kind: PauseKind, lease_seconds: float | None) -> None:
        """Renew the lease of a pause in mode `wait` while its samples still run."""
        if self._draining == (owner, kind):
            self._table.start(owner, lease_seconds, kind=kind)

    async def start(
        self,
        owner: str,
        kind: PauseKind,
        mode: PauseMode,
        lease_seconds: float | None,
        *,
        recompute: bool = False,
    ) -> None:
        """Pause the engine for a pause or a sleep, and record it.

        Raises VersionConflict if mode `wait` is not possible, or if the pause ends before the
        running samples do.
        """
        if mode == "wait":
            await self._drain(owner, kind, lease_seconds)
            if recompute:
                await self._engine.pause("keep", recompute=True)
        else:
            await self.pause(mode, recompute=recompute)
        self._table.start(owner, lease_seconds, kind=kind)

    async def pause(self, mode: PauseMode, *, recompute: bool = False) -> None:
        """Pause the engine for a change, which other pauses outlast."""
        await self._engine.pause(mode, recompute=recompute)
        if mode == "abort" and len(self._table):
            await self._engine.pause("keep")

    async def resume_unless_paused(self) -> None:
        if not len(self._table):
            await self._engine.resume()

    async def _drain(self, owner: str, kind: PauseKind, lease_seconds: float | None) -> None:
        if self._table.has_other(owner, "pause"):
            raise VersionConflict(
                "another API key pauses sampling, or the engine sleeps: mode wait would run frozen "
                "samples"
            )
        self._table.start(owner, lease_seconds, kind=kind)
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
        ended = asyncio.ensure_future(self._table.wait_until_ended(owner, kind))
        try:
            await asyncio.wait({draining, ended}, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                draining.result()
            return draining.done()
        finally:
            draining.cancel()
            ended.cancel()
            await asyncio.gather(draining, ended, return_exceptions=True)
