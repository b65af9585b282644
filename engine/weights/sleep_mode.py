"""Sleep mode of the running engine, called from the service's process."""

import logging
from collections.abc import Set as AbstractSet

from engine.errors import EngineDead, MemoryUnavailable
from engine.runtime.engine_calls import EngineCalls
from engine.runtime.heartbeat import Heartbeat
from engine.types import WEIGHTS, SleepLevel, SleepTag
from engine.weights.loaded_adapters import LoadedAdapters
from engine.weights.updates import ServedWeights

log = logging.getLogger(__name__)


class SleepMode:
    """Memory that the engine has released, and its allocation.

    Weights that level 2 dropped are loaded when everything is awake, unless an update has loaded
    others before. A wake is refused while another process uses the memory. Any other failure marks
    the engine as dead, as its memory is then in an unknown state.
    """

    def __init__(
        self,
        processes: EngineCalls,
        heartbeat: Heartbeat,
        weights: ServedWeights,
        adapters: LoadedAdapters,
    ) -> None:
        self._processes = processes
        self._heartbeat = heartbeat
        self._weights = weights
        self._adapters = adapters
        self._sleeping: frozenset[SleepTag] = frozenset()
        self._are_weights_dropped = False
        self._are_adapters_dropped = False

    @property
    def is_asleep(self) -> bool:
        """True while any memory is released."""
        return bool(self._sleeping)

    async def sleep(self, level: SleepLevel, tags: AbstractSet[SleepTag]) -> None:
        assert not self._sleeping, "wake the engine first"
        drops = level == 2 and WEIGHTS in tags
        self._heartbeat.set_stage("activating")
        try:
            if drops:
                await self._weights.check_reload()
            self._sleeping = frozenset(tags)
            self._are_weights_dropped = self._are_adapters_dropped = drops
            await self._call("coppice_sleep", level, sorted(tags))
        finally:
            self.restore_stage()

    async def wake(self, tags: AbstractSet[SleepTag]) -> str | None:
        """Allocate memory with these tags; see `engine.protocol.Engine.wake`."""
        restored = None
        self._heartbeat.set_stage("activating")
        try:
            if woken := self._sleeping & tags:
                await self._check_memory(woken)
                await self._call("coppice_wake", sorted(woken))
                self._sleeping -= woken
            if not self._sleeping:
                restored = await self._load_dropped()
        finally:
            self.restore_stage()
        return restored

    async def _check_memory(self, tags: AbstractSet[SleepTag]) -> None:
        """Raise MemoryUnavailable, before anything is changed, if a worker lacks the memory."""
        missing = await self._processes.call_workers("coppice_missing_bytes", sorted(tags))
        if num_bytes := max((num for num in missing if num is not None), default=0):
            raise MemoryUnavailable(
                f"the wake needs {num_bytes} bytes more than are free on the device"
            )

    def on_weights_loaded(self) -> None:
        self._are_weights_dropped = False
        self.restore_stage()

    async def _load_dropped(self) -> str | None:
        """Load what was dropped; returns the version of the weights if it is another one now."""
        restored = None
        if self._are_weights_dropped:
            restored = await self._weights.reload()
            self._are_weights_dropped = False
        if self._are_adapters_dropped:
            if not await self._adapters.reload(self._processes):
                self._heartbeat.mark_dead("an adapter cannot be loaded again")
                raise EngineDead("an adapter cannot be loaded again")
            self._are_adapters_dropped = False
        return restored

    async def _call(self, method: str, *args: object) -> None:
        reasons = await self._processes.call_workers(method, *args)
        if failed := [reason for reason in reasons if reason is not None]:
            log.error("%s failed: %s", method, failed[0])
            self._heartbeat.mark_dead(f"{method} failed")
            raise EngineDead("the engine's memory could not be released or allocated")

    def restore_stage(self) -> None:
        """Set the stage of an engine that does not change weights or memory."""
        self._heartbeat.set_stage("sleeping" if self._sleeping else "serving")
