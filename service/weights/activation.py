"""Activation of a staged weights version while samples are running.

One activation runs at a time. The gate that admits rollouts is closed from before the engine is
paused until the new version is active, so no rollout is admitted under one version and started
under another. Once started, an activation completes even if its caller disconnects. A pause
outlasts activations, and ends with its lease, but never during an activation.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from coppice.wire.columns.kv_versions import ActivationKv
from coppice.wire.weights import ActivationAnswer, ActivationMode
from engine.errors import (
    CheckpointRefused,
    EngineDead,
    EngineError,
    FilesRestored,
    LoadFailed,
)
from engine.protocol.weights import Weights
from engine.types.samples import PauseMode
from engine.weights.ipc_tensors import WeightTransfer
from service.errors import (
    DRAINING_RETRY_SECONDS,
    ActivationFailed,
    Draining,
    EngineGone,
    ServiceError,
    VersionConflict,
    WeightsRefused,
)
from service.kv.handles.manager import PromptKvManager
from service.observability.metrics import Metrics
from service.rollouts.manager import RolloutManager
from service.state_changes import StateChanges
from service.versions import Version, Versions, publish_again
from service.weights.engine_pauses import EnginePauses
from service.weights.idle_wait import IdleWait
from service.weights.pauses import Pauses
from service.weights.replication.announcer import Announcer
from service.weights.sleep import Sleep
from service.weights.stager import WeightStager

log = logging.getLogger(__name__)


class Activation:
    """Switches the engine to another weights version, also while it is paused."""

    def __init__(
        self,
        engine: Weights,
        versions: Versions,
        stager: WeightStager,
        rollouts: RolloutManager,
        prompt_kv: PromptKvManager,
        announcer: Announcer,
        state_changes: StateChanges,
        metrics: Metrics,
        *,
        max_lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._versions = versions
        self._stager = stager
        self._rollouts = rollouts
        self._prompt_kv = prompt_kv
        self._announcer = announcer
        self._state_changes = state_changes
        self._metrics = metrics.weights
        self._clock = clock
        self._applying = asyncio.Lock()
        self._idle_wait = IdleWait(rollouts)
        self.pauses = EnginePauses(engine, Pauses(max_lease_seconds, clock=clock), self._idle_wait)
        self.sleep = Sleep(
            engine,
            versions,
            rollouts,
            prompt_kv,
            self.pauses,
            metrics.server,
            on_restored=self._on_loaded,
            clock=clock,
        )

    async def reset_prefix_cache(self) -> None:
        """Reset the engine's prefix cache; running samples keep their KV blocks."""
        async with self.pauses.lock:
            await self._engine.pause("keep")
            try:
                await self._engine.reset_prefix_cache()
            finally:
                await self.pauses.resume_unless_paused()

    async def apply(
        self,
        label: str,
        mode: ActivationMode,
        *,
        allow_rollback: bool,
        kv: ActivationKv = "reset",
        order: int | None = None,
    ) -> ActivationAnswer:
        """Activate a weights version on this replica; completes even if its caller disconnects.

        In mode `wait` it first waits for the running samples. A pause that freezes them, another
        activation, and the end of a drain end the wait with an error. `order` is that of an earlier
        `request`, of which this is the first or a repeated attempt.
        """
        await self._announcer.check_unchanged(label)
        return await self._state_changes.run(self._apply(label, mode, allow_rollback, kv, order))

    async def _apply(
        self,
        label: str,
        mode: ActivationMode,
        allow_rollback: bool,
        kv: ActivationKv,
        order: int | None,
    ) -> ActivationAnswer:
        checked = await self._check_files(label, allow_rollback)
        order = self.request(label, mode, order)
        with self._idle_wait.clearing_on_failure(order):
            answer = await self._apply_next(label, mode, allow_rollback, kv, checked)
        await self._stager.trim()
        self._metrics.record_activation(answer)
        return answer

    async def _check_files(self, label: str, allow_rollback: bool) -> Version | None:
        """Check the files of a version before its activation ends the wait of another one.

        Returns the version, or None if it is active.
        """
        version = self._versions.check_activation(label, allow_rollback=allow_rollback)
        if version == self._versions.active:
            return None
        self.sleep.check_weights_awake()
        await self._stager.revalidate(version)
        self._versions.check_activation(label, allow_rollback=allow_rollback)
        return version

    async def _apply_next(
        self,
        label: str,
        mode: ActivationMode,
        allow_rollback: bool,
        kv: ActivationKv,
        checked: Version | None,
    ) -> ActivationAnswer:
        async with self._applying:
            version = self._versions.check_activation(label, allow_rollback=allow_rollback)
            with self._versions.activating(label):
                is_new = version != self._versions.active
                if is_new:
                    if checked is None:  # another version was activated meanwhile
                        await self._stager.revalidate(version)
                    self.sleep.check_weights_awake()
                if is_new and mode == "wait":
                    return await self._activate_when_idle(label, allow_rollback, kv)
                async with self.pauses.lock:
                    return await self._activate(label, mode, allow_rollback, kv)

    async def _activate_when_idle(
        self, label: str, allow_rollback: bool, kv: ActivationKv
    ) -> ActivationAnswer:
        """Activate once no rollout is sampling. Pauses can start and end during the wait."""
        async with self._rollouts.close_gate():
            while True:
                async with self.pauses.lock:
                    _check_available(self._versions.get(label))
                    self._check_can_wait()
                    if self._rollouts.is_idle:
                        return await self._activate(label, "wait", allow_rollback, kv)
                await self._idle_wait.run(label, "wait")

    def request(self, label: str, mode: ActivationMode, order: int | None = None) -> int:
        """Record an activation that follows, which ends the wait of a different one.

        Returns its order.
        """
        return self._idle_wait.request(label, mode, order)

    def is_replaced(self, order: int) -> bool:
        """True if an activation that was requested after `order` has succeeded or runs."""
        return self._idle_wait.is_replaced(order)

    def on_transfer_withdrawn(self) -> None:
        """End the wait of an activation in mode `wait` whose publisher has gone."""
        self._idle_wait.wake_after(0.0)

    def end_wait(self) -> None:
        """End the wait of an activation in mode `wait`, because the server stops."""
        self._idle_wait.end(Draining(retry_after_seconds=DRAINING_RETRY_SECONDS))

    async def _activate(
        self, label: str, mode: ActivationMode, allow_rollback: bool, kv: ActivationKv
    ) -> ActivationAnswer:
        version = self._versions.check_activation(label, allow_rollback=allow_rollback)
        previous = self._versions.active
        if version == previous:
            return _answer(version, previous, mode, paused_seconds=0.0, samples_ended=0)
        self.sleep.check_weights_awake()
        _check_available(version)
        async with self._rollouts.close_gate(), self._opened(version):
            return await self._switch(version, previous, mode, kv)

    @asynccontextmanager
    async def _opened(self, version: Version) -> AsyncIterator[None]:
        """Context manager in which all ranks have opened and checked tensors in GPU memory.

        So tensors that cannot be loaded are refused before a sample ends.
        """
        if version.transfer is not None:
            await self._open(version.transfer)
        try:
            yield
        finally:
            if version.transfer is not None:
                await self._engine.close_transfer()

    async def _open(self, transfer: WeightTransfer) -> None:
        try:
            await self._engine.open_transfer(transfer.tensors)
        except CheckpointRefused as refused:
            raise WeightsRefused(str(refused)) from refused
        except LoadFailed as error:
            raise ActivationFailed(str(error)) from error
        except EngineDead as error:
            raise EngineGone(str(error)) from error

    def _check_can_wait(self) -> None:
        """Refuse activation mode `wait` if a pause would keep rollouts from ending.

        Call it while the gate is closed. It counts rollouts, because an admitted rollout may not
        have started its samples yet.
        """
        if self.pauses.paused and not self._rollouts.is_idle:
            raise _frozen()

    async def _switch(
        self, version: Version, previous: Version, mode: ActivationMode, kv: ActivationKv
    ) -> ActivationAnswer:
        began = self._clock()
        pause: PauseMode = "abort" if mode == "abort" else "keep"
        await self.pauses.pause_engine(pause, recompute=mode == "recompute")
        try:
            await self._prompt_kv.exports.before_weights_update()
            samples_ended = await self._rollouts.end_groups_bound_to_other_versions(version.label)
            num_kept_tokens = await self._load(version, kv)
        except EngineGone:
            raise  # the engine stays paused: partially loaded weights must not be used
        except (ServiceError, EngineError):
            await self.pauses.resume_unless_paused()
            raise
        await self.pauses.resume_unless_paused()
        seconds = self._clock() - began
        log.info("activated %s in %.3f s", version.label, seconds)
        return _answer(
            version,
            previous,
            mode,
            paused_seconds=seconds,
            samples_ended=samples_ended,
            num_kept_tokens=num_kept_tokens,
        )

    async def _load(self, version: Version, kv: ActivationKv) -> int:
        """Load a version; returns the number of tokens whose KV stays in the prefix cache."""
        try:
            num_kept = await self._load_into_engine(version, keep_kv=kv == "keep_running")
        except FilesRestored as error:
            self._on_loaded(error.version)
            raise ActivationFailed(str(error)) from error
        except LoadFailed as error:
            raise ActivationFailed(str(error)) from error
        except EngineDead as error:
            raise EngineGone(str(error)) from error
        self._on_loaded(version.label)
        return num_kept

    async def _load_into_engine(self, version: Version, *, keep_kv: bool) -> int:
        if version.transfer is None:
            return await self._engine.update_weights(version.path, version.label, keep_kv=keep_kv)
        _check_available(version)
        return await self._engine.transfer_weights(version.label, keep_kv=keep_kv)

    def _on_loaded(self, label: str) -> None:
        self._versions.activated(label)
        self._prompt_kv.exports.after_weights_update(label)


def _check_available(version: Version) -> None:
    """Refuse tensors in GPU memory whose publisher does not wait: it may have changed them.

    Repeated while an activation waits: the active version may have been one, and been replaced.
    """
    if version.has_files:
        return
    if version.transfer is None:
        raise publish_again()
    if version.transfer.is_withdrawn:
        raise VersionConflict("the publisher has closed its connection; nothing was loaded")


def _frozen() -> VersionConflict:
    return VersionConflict("sampling is paused, and running samples cannot end: resume it first")


def _answer(
    version: Version,
    previous: Version,
    mode: ActivationMode,
    *,
    paused_seconds: float,
    samples_ended: int,
    num_kept_tokens: int = 0,
) -> ActivationAnswer:
    return ActivationAnswer(
        version=version.label,
        sequence=version.sequence,
        previous=previous.label,
        mode=mode,
        paused_seconds=paused_seconds,
        samples_ended=samples_ended,
        num_kept_tokens=num_kept_tokens,
    )
