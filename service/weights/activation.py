"""Activation of a staged weights version while samples run, as a state machine.

One activation runs at a time. The gate that admits rollouts is closed from before the engine is
paused until the new version is active, so no rollout is admitted under one version and started
under another. Once started, an activation completes even if its caller disconnects. A pause
outlasts activations, and ends with its lease, but never during an activation.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from enum import StrEnum, auto
from typing import Final

from coppice.wire.columns.kv_version_spans import ActivationKv
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
from service.uncancellable_tasks import StateChanges
from service.weights.idle_wait import IdleWait
from service.weights.pauses import Pauses
from service.weights.replication.announcer import Announcer
from service.weights.sleep import Sleep
from service.weights.stager import WeightStager
from service.weights_versions import Version, Versions

log = logging.getLogger(__name__)


class ActivationState(StrEnum):
    """Stage of the activation in progress.

    WAITING: for the running samples. STAGING: all ranks open and check tensors in GPU memory.
    FAILED: the engine died, perhaps with partly loaded weights; it stays paused for good.
    """

    IDLE = auto()
    WAITING = auto()
    STAGING = auto()
    PAUSING = auto()
    LOADING = auto()
    RESUMING = auto()
    FAILED = auto()


_S = ActivationState
NEXT_STATES: Final[Mapping[ActivationState, set[ActivationState]]] = {
    _S.IDLE: {_S.WAITING, _S.STAGING, _S.PAUSING},
    _S.WAITING: {_S.WAITING, _S.STAGING, _S.PAUSING, _S.IDLE},
    _S.STAGING: {_S.PAUSING, _S.IDLE, _S.FAILED},
    _S.PAUSING: {_S.LOADING, _S.RESUMING, _S.IDLE},
    _S.LOADING: {_S.RESUMING, _S.IDLE, _S.FAILED},
    _S.RESUMING: {_S.IDLE},
    _S.FAILED: set(),
}
"""Allowed transitions. An error leads to IDLE, from LOADING usually by way of RESUMING."""


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
        self.state = ActivationState.IDLE
        self.idle_wait = IdleWait(rollouts)
        self.pauses = Pauses(engine, self.idle_wait.wake_after, max_lease_seconds, clock=clock)
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
        request in `idle_wait`, of which this is the first or a repeated attempt.
        """
        await self._announcer.check_unchanged(label)
        return await self._state_changes.run(self._apply(label, mode, allow_rollback, kv, order))

    def end_wait(self) -> None:
        """End the wait of an activation in mode `wait`, because the server stops."""
        self.idle_wait.end(Draining(retry_after_seconds=DRAINING_RETRY_SECONDS))

    async def _apply(
        self,
        label: str,
        mode: ActivationMode,
        allow_rollback: bool,
        kv: ActivationKv,
        order: int | None,
    ) -> ActivationAnswer:
        # Whatever is refused here does not end the wait of another activation.
        version = self._check(label, allow_rollback)
        was_active = version == self._versions.active
        if not was_active and version.may_change:
            await self._stager.revalidate(version)
            self._check(label, allow_rollback)  # it may have been deleted meanwhile
        order = self.idle_wait.request(label, mode, order)
        with self.idle_wait.clearing_on_failure(order):
            async with self._one_at_a_time(label):
                if was_active and label != self._versions.active.label:
                    await self._stager.revalidate(self._versions.get(label))
                if mode == "wait" and label != self._versions.active.label:
                    answer = await self._activate_when_idle(label, allow_rollback, kv)
                else:
                    async with self.pauses.lock:
                        version = self._check(label, allow_rollback)
                        answer = await self._activate(version, mode, kv)
        await self._stager.trim()
        self._metrics.record_activation(answer)
        return answer

    def _check(self, label: str, allow_rollback: bool) -> Version:
        """Check that a version can be activated now; call it again after an await."""
        version = self._versions.check_activation(label, allow_rollback=allow_rollback)
        if version != self._versions.active:
            if self.state is ActivationState.FAILED:
                raise EngineGone("the engine died during an activation")
            self.sleep.check_weights_awake()
            version.check_available()
        return version

    @asynccontextmanager
    async def _one_at_a_time(self, label: str) -> AsyncIterator[None]:
        """Context manager of the activation in progress, whose version cannot be deleted."""
        async with self._applying:
            with self._versions.activating(label):
                try:
                    yield
                finally:
                    if self.state not in (ActivationState.IDLE, ActivationState.FAILED):
                        self._enter(ActivationState.IDLE)

    def _enter(self, state: ActivationState) -> None:
        assert state in NEXT_STATES[self.state], f"{state} does not follow {self.state}"
        self.state = state

    async def _activate_when_idle(
        self, label: str, allow_rollback: bool, kv: ActivationKv
    ) -> ActivationAnswer:
        """Activate once no rollout is sampling. Pauses can start and end during the wait."""
        async with self._rollouts.close_gate():
            while True:
                async with self.pauses.lock:
                    self._check_can_wait()
                    version = self._check(label, allow_rollback)
                    if self._rollouts.is_idle:
                        return await self._activate(version, "wait", kv)
                self._enter(ActivationState.WAITING)
                await self.idle_wait.run(label, "wait")

    def _check_can_wait(self) -> None:
        """Refuse activation mode `wait` if a pause would keep rollouts from ending.

        Call it while the gate is closed. It counts rollouts, because an admitted rollout may not
        have started its samples yet.
        """
        if self.pauses.paused and not self._rollouts.is_idle:
            raise VersionConflict(
                "sampling is paused, and running samples cannot end: resume it first"
            )

    async def _activate(
        self, version: Version, mode: ActivationMode, kv: ActivationKv
    ) -> ActivationAnswer:
        """Activate a version that was checked since the caller holds the lock of the pauses."""
        previous = self._versions.active
        if version == previous:
            return _answer(version, previous, mode)
        async with self._rollouts.close_gate(), self._opened(version):
            return await self._switch(version, previous, mode, kv)

    @asynccontextmanager
    async def _opened(self, version: Version) -> AsyncIterator[None]:
        """Context manager in which all ranks have opened and checked tensors in GPU memory.

        So tensors that cannot be loaded are refused before a sample ends.
        """
        if version.transfer is None:
            yield
            return
        self._enter(ActivationState.STAGING)
        with self._service_errors():
            await self._engine.open_transfer(version.transfer.tensors)
        try:
            yield
        finally:
            await self._engine.close_transfer()

    async def _switch(
        self, version: Version, previous: Version, mode: ActivationMode, kv: ActivationKv
    ) -> ActivationAnswer:
        began = self._clock()
        self._enter(ActivationState.PAUSING)
        pause: PauseMode = "abort" if mode == "abort" else "keep"
        await self.pauses.pause_engine(pause, recompute=mode == "recompute")
        try:
            await self._prompt_kv.exports.before_weights_update()
            samples_ended = await self._rollouts.end_groups_bound_to_other_versions(version.label)
            self._enter(ActivationState.LOADING)
            num_kept_tokens = await self._load(version, keep_kv=kv == "keep_running")
        except EngineGone:
            raise  # the engine stays paused: partially loaded weights must not be used
        except (ServiceError, EngineError):
            await self._resume()
            raise
        await self._resume()
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

    async def _resume(self) -> None:
        self._enter(ActivationState.RESUMING)
        await self.pauses.resume_unless_paused()

    async def _load(self, version: Version, *, keep_kv: bool) -> int:
        """Load a version; returns the number of tokens whose KV stays in the prefix cache."""
        with self._service_errors():
            try:
                if version.transfer is None:
                    num_kept = await self._engine.update_weights(
                        version.path, version.label, keep_kv=keep_kv
                    )
                else:
                    version.check_available()  # no await lies between this and the load
                    num_kept = await self._engine.transfer_weights(version.label, keep_kv=keep_kv)
            except FilesRestored as error:
                self._on_loaded(error.version)
                raise
        self._on_loaded(version.label)
        return num_kept

    @contextmanager
    def _service_errors(self) -> Iterator[None]:
        """Context manager that translates the errors of the engine; its death is final."""
        try:
            yield
        except CheckpointRefused as refused:
            raise WeightsRefused(str(refused)) from refused
        except LoadFailed as error:
            raise ActivationFailed(str(error)) from error
        except EngineDead as error:
            self._enter(ActivationState.FAILED)
            raise EngineGone(str(error)) from error

    def _on_loaded(self, label: str) -> None:
        self._versions.activated(label)
        self._prompt_kv.exports.after_weights_update(label)


def _answer(
    version: Version,
    previous: Version,
    mode: ActivationMode,
    *,
    paused_seconds: float = 0.0,
    samples_ended: int = 0,
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
