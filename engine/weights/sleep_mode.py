"""Sleep and wake of the running engine, from the service's process."""

import logging
from collections.abc import Set as AbstractSet

from engine.errors import EngineDead, LoadFailed, MemoryUnavailable
from engine.runtime.engine_protocols import EngineCalls, SleepListener
from engine.runtime.heartbeat import Heartbeat
from engine.types.samples import WEIGHTS, SleepLevel, SleepTag
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
        listener: SleepListener,
    ) -> None:
        self._processes = processes
        self._heartbeat = heartbeat
        self._weights = weights
        self._listener = listener
        self._sleeping: frozenset[SleepTag] = frozenset()

    async def sleep(self, level: SleepLevel, tags: AbstractSet[SleepTag]) -> None:
        assert not self._sleeping, "wake the engine first"
        drops_weights = level == 2 and WEIGHTS in tags
        with self._heartbeat.activating():
            if drops_weights:
                await self._weights.check_reload()
                self._weights.drop()
            self._set_sleeping(tags)
            self._listener.on_sleep(drops_weights=drops_weights)
            await self._call("coppice_sleep", level, sorted(tags))

    async def wake(self, tags: AbstractSet[SleepTag]) -> str | None:
        """Allocate memory with these tags; see `engine.protocol.weights.Weights.wake`."""
        with self._heartbeat.activating():
            if woken := self._sleeping & tags:
                await self._check_memory(woken)
                await self._call("coppice_wake", sorted(woken))
                self._set_sleeping(self._sleeping - woken)
            return None if self._sleeping else await self._on_awake()

    def _set_sleeping(self, tags: AbstractSet[SleepTag]) -> None:
        self._sleeping = frozenset(tags)
        self._heartbeat.is_asleep = bool(tags)

    async def _check_memory(self, tags: AbstractSet[SleepTag]) -> None:
        """Raise MemoryUnavailable, before anything is changed, if a worker lacks the memory."""
        missing = await self._processes.call_workers("coppice_missing_bytes", sorted(tags))
        if num_bytes := max((num for num in missing if num is not None), default=0):
            raise MemoryUnavailable(
                f"the wake needs {num_bytes} bytes more than are free on the device"
            )

    async def _on_awake(self) -> str | None:
        """Load what was dropped; returns the version of the weights if it is another one now."""
        restored = await self._weights.reload_dropped()
        try:
            await self._listener.on_wake()
        except LoadFailed as error:
            self._heartbeat.mark_dead(str(error))
            raise EngineDead(str(error)) from error
        return restored

    async def _call(self, method: str, *args: object) -> None:
        reasons = await self._processes.call_workers(method, *args)
        if failed := [reason for reason in reasons if reason is not None]:
            log.error("%s failed: %s", method, failed[0])
            self._heartbeat.mark_dead(f"{method} failed")
            raise EngineDead("the engine's memory could not be released or allocated")
