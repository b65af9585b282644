"""Sleep of the engine: releases the memory of weights, KV cache or both until it wakes.

A sleep is a pause that has released memory. It ends with a wake, or at the end of its lease.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import Final

from engine.errors import EngineError, LoadFailed, MemoryUnavailable
from engine.protocol.weights import Weights
from engine.types.samples import WEIGHTS, PauseMode, SleepLevel, SleepTag
from service.errors import Asleep, ServiceError
from service.kv.handles.manager import PromptKvManager
from service.observability.metrics import ServerMetrics
from service.rollouts.manager import RolloutManager
from service.weights.pauses import Pause, Pauses
from service.weights_versions import Versions

WAKE_RETRY_SECONDS: Final = 2.0
"""Time until a wake at the end of a lease is repeated, if another process uses the memory."""

log = logging.getLogger(__name__)


class Sleep:
    """Lets the engine sleep and wake for API keys, and ends pauses whose leases have ended.

    `on_restored` is called with the version that is served after a wake if the weights of the
    active one, which has no files, are lost.
    """

    def __init__(
        self,
        engine: Weights,
        versions: Versions,
        rollouts: RolloutManager,
        prompt_kv: PromptKvManager,
        pauses: Pauses,
        metrics: ServerMetrics,
        *,
        on_restored: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._versions = versions
        self._rollouts = rollouts
        self._prompt_kv = prompt_kv
        self._pauses = pauses
        self._on_restored = on_restored
        self._leases_ended = metrics.pause_leases_ended
        self._clock = clock
        self._level: SleepLevel = 1
        self._sleeping: frozenset[SleepTag] = frozenset()
        self._is_overdue = False  # the lease of the sleep has ended, but no wake has succeeded

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager of the task that ends pauses whose leases have ended."""
        task = asyncio.create_task(self._end_leases())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @property
    def level(self) -> int:
        """Level at which the engine sleeps; 0 if it is awake."""
        return self._level if self._sleeping else 0

    @property
    def tags(self) -> frozenset[SleepTag]:
        """Parts of the engine's memory that are released."""
        return self._sleeping

    async def sleep(
        self,
        owner: str,
        level: SleepLevel,
        tags: AbstractSet[SleepTag],
        mode: PauseMode,
        lease_seconds: float | None,
    ) -> None:
        """Pause sampling and release the engine's memory, or renew the lease of the same sleep."""
        self._pauses.renew(owner, "sleep", lease_seconds)
        async with self._pauses.lock:
            if self._sleeping:
                self._check_same_sleep(owner, level, tags)
            else:
                await self._pauses.start(owner, "sleep", mode, lease_seconds, recompute=True)
                await self._fall_asleep(owner, level, tags)
            self._pauses.put(owner, "sleep", lease_seconds)
            self._is_overdue = False

    def _check_same_sleep(self, owner: str, level: SleepLevel, tags: AbstractSet[SleepTag]) -> None:
        if not self._pauses.has(owner, "sleep"):
            raise Asleep("the engine sleeps for another API key")
        if (level, tags) != (self._level, self._sleeping):
            raise Asleep(
                f"the engine sleeps at level {self._level}, with {_names(self._sleeping)} "
                "released: wake it before another sleep"
            )

    async def _fall_asleep(
        self, owner: str, level: SleepLevel, tags: AbstractSet[SleepTag]
    ) -> None:
        began = self._clock()
        try:
            await self._prompt_kv.exports.before_weights_update()
            await self._engine.sleep(level, tags)
        except (LoadFailed, ServiceError) as error:
            self._pauses.remove("sleep", owner)
            await self._pauses.resume_unless_paused()
            if isinstance(error, LoadFailed):
                raise Asleep(f"level 2 is not possible: {error}") from error
            raise
        self._level, self._sleeping = level, frozenset(tags)
        seconds = self._clock() - began
        log.info("asleep at level %s without %s in %.3f s", level, _names(tags), seconds)

    async def wake(
        self, owner: str, tags: AbstractSet[SleepTag], *, is_for_all: bool = False
    ) -> None:
        """Allocate memory with these tags again; once everything is awake, the sleep has ended.

        This also ends a sleep in mode `wait` whose samples still run.
        """
        if not self._sleeping:
            self._pauses.remove("sleep", None if is_for_all else owner)
        async with self._pauses.lock:
            if self._sleeping and not (is_for_all or self._pauses.has(owner, "sleep")):
                raise Asleep("the engine sleeps for another API key")
            try:
                await self._wake(tags)
            except MemoryUnavailable as error:
                raise Asleep(f"{error}; the engine still sleeps: repeat the call later") from error
            if not self._sleeping:
                self._pauses.remove("sleep", None)
                await self._pauses.resume_unless_paused()

    async def _wake(self, tags: AbstractSet[SleepTag]) -> None:
        began, woken = self._clock(), self._sleeping & tags
        if woken:
            await self._wake_engine(woken)
            self._sleeping -= woken
            log.info("woke %s in %.3f s", _names(woken), self._clock() - began)
        if not self._sleeping:
            self._is_overdue = False

    async def _wake_engine(self, tags: AbstractSet[SleepTag]) -> None:
        """Wake the engine. Dropped weights without files are replaced by the last ones with files.

        Groups that require the replaced version end.
        """
        if self._versions.active.has_files:
            await self._engine.wake(tags)
            return
        async with self._rollouts.close_gate():
            restored = await self._engine.wake(tags)
            if restored is not None:
                await self._rollouts.end_groups_bound_to_other_versions(restored)
                log.warning("%s has no files; %s is active", self._versions.active.label, restored)
                self._on_restored(restored)

    def check_weights_awake(self) -> None:
        if WEIGHTS in self._sleeping:
            raise Asleep("the memory of the weights is released: wake the weights first")

    async def _end_leases(self) -> None:
        while True:
            await self._pauses.wait_until_one_ends()
            async with self._pauses.lock:
                await self._end_due_pauses()

    async def _end_due_pauses(self) -> None:
        for pause in self._pauses.ended():
            self._record_lease_end(pause)
            if pause.kind == "pause" or await self._wake_after_lease(pause):
                self._pauses.remove(pause.kind, pause.owner)
        try:
            await self._pauses.resume_unless_paused()
        except EngineError as error:
            log.error("sampling was not resumed at the end of a pause: %s", error)

    def _record_lease_end(self, pause: Pause) -> None:
        """Log and count the end of a lease once, also if the wake is repeated."""
        if pause.kind == "sleep" and self._is_overdue:
            return
        self._is_overdue = pause.kind == "sleep" or self._is_overdue
        log.warning("the %s by %s has ended: its lease was not renewed", pause.kind, pause.owner)
        self._leases_ended.inc()

    async def _wake_after_lease(self, sleep: Pause) -> bool:
        """Wake everything; without memory for it, the sleep goes on until the next attempt."""
        try:
            await self._wake(self._sleeping)
        except MemoryUnavailable as error:
            log.warning("the engine sleeps beyond the end of its lease: %s", error)
            self._pauses.put(sleep.owner, "sleep", WAKE_RETRY_SECONDS)
            return False
        except EngineError as error:
            log.error("the engine was not woken at the end of a sleep: %s", error)
        return True


def _names(tags: AbstractSet[SleepTag]) -> str:
    return " and ".join(sorted(tags))
