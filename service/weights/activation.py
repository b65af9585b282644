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
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from typing import Final

from coppice.wire.kv_versions import ActivationKv
from coppice.wire.weights import ActivationAnswer, ActivationMode
from engine.errors import (
    CheckpointRefused,
    EngineDead,
    EngineError,
    FilesRestored,
    LoadFailed,
    MemoryUnavailable,
)
from engine.protocol import Engine
from engine.types import WEIGHTS, PauseMode, SleepLevel, SleepTag
from engine.weights.ipc_tensors import WeightTransfer
from service.errors import (
    DRAINING_RETRY_SECONDS,
    ActivationFailed,
    Asleep,
    Draining,
    EngineGone,
    ServiceError,
    VersionConflict,
    WeightsRefused,
)
from service.observability.metrics import Metrics
from service.prompt_kv.manager import PromptKvManager
from service.rollouts.manager import RolloutManager
from service.state_changes import StateChanges
from service.versions import Version, Versions, publish_again
from service.weights.engine_pauses import EnginePauses
from service.weights.idle_wait import IdleWait
from service.weights.pauses import Pause, PauseKind, Pauses
from service.weights.replication.announcer import Announcer
from service.weights.stager import WeightStager

WAKE_RETRY_SECONDS: Final = 2.0
"""Time until a wake at the end of a lease is repeated, if another process uses the memory."""

COMPLETION_SECONDS: Final = 1.0
"""Time for rollouts to become idle after a pause in mode `wait` or `abort` has ended samples."""

log = logging.getLogger(__name__)


class Activation:
    """Switches the engine to another weights version, and owns the engine's pause state."""

    def __init__(
        self,
        engine: Engine,
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
        self._metrics = metrics
        self._clock = clock
        self._applying = asyncio.Lock()
        self._lock = asyncio.Lock()
        self._sleep_level: SleepLevel = 1
        self._sleeping: frozenset[SleepTag] = frozenset()
        self._is_overdue = False  # the lease of the sleep has ended, but no wake has succeeded
        self._pauses = Pauses(max_lease_seconds, clock=clock)
        self._engine_pauses = EnginePauses(engine, self._pauses)
        self._idle_wait = IdleWait(rollouts)

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
    def paused(self) -> bool:
        return len(self._pauses) > 0

    @property
    def pause_seconds_left(self) -> float | None:
        return self._pauses.seconds_left

    async def pause(self, owner: str, mode: PauseMode, lease_seconds: float | None) -> None:
        """Start or renew the pause of an API key; None: without a lease."""
        self._engine_pauses.renew(owner, "pause", lease_seconds)
        async with self._lock:
            await self._engine_pauses.start(owner, "pause", mode, lease_seconds)
            self._check_wait_after_pause(mode)

    def _check_wait_after_pause(self, mode: PauseMode) -> None:
        """Let an activation that waits check whether a new pause keeps its samples from ending.

        The modes `wait` and `abort` end running samples, but freeze those that start afterwards,
        such as the next ones of a rollout whose first samples have ended.
        """
        self._idle_wait.wake_after(0.0 if mode == "keep" else COMPLETION_SECONDS)

    async def resume(self, owner: str, *, is_for_all: bool = False) -> None:
        """End the pause of an API key, or of all; sampling resumes with the end of the last one.

        This also ends a pause in mode `wait` whose samples still run, and which holds the lock.
        """
        self._end("pause", None if is_for_all else owner)
        async with self._lock:
            self._end("pause", None if is_for_all else owner)
            await self._resume_unless_paused()

    def _end(self, kind: PauseKind, owner: str | None) -> None:
        if owner is None:
            self._pauses.end_all(kind)
        else:
            self._pauses.end(owner, kind)

    @property
    def sleep_level(self) -> int:
        """Level at which the engine sleeps; 0 if it is awake."""
        return self._sleep_level if self._sleeping else 0

    @property
    def sleeping(self) -> frozenset[SleepTag]:
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
        self._engine_pauses.renew(owner, "sleep", lease_seconds)
        async with self._lock:
            if self._sleeping:
                self._check_same_sleep(owner, level, tags)
            else:
                await self._engine_pauses.start(owner, "sleep", mode, lease_seconds, recompute=True)
                self._check_wait_after_pause(mode)
                await self._fall_asleep(owner, level, tags)
            self._pauses.start(owner, lease_seconds, kind="sleep")
            self._is_overdue = False

    def _check_same_sleep(self, owner: str, level: SleepLevel, tags: AbstractSet[SleepTag]) -> None:
        if not self._pauses.has(owner, "sleep"):
            raise Asleep("the engine sleeps for another API key")
        if (level, tags) != (self._sleep_level, self._sleeping):
            raise Asleep(
                f"the engine sleeps at level {self._sleep_level}, with {_names(self._sleeping)} "
                "released: wake it before another sleep"
            )

    async def _fall_asleep(
        self, owner: str, level: SleepLevel, tags: AbstractSet[SleepTag]
    ) -> None:
        began = self._clock()
        try:
            await self._prompt_kv.before_weights_update()
            await self._engine.sleep(level, tags)
        except (LoadFailed, ServiceError) as error:
            self._pauses.end(owner, "sleep")
            await self._resume_unless_paused()
            if isinstance(error, LoadFailed):
                raise Asleep(f"level 2 is not possible: {error}") from error
            raise
        self._sleep_level, self._sleeping = level, frozenset(tags)
        seconds = self._clock() - began
        log.info("asleep at level %s without %s in %.3f s", level, _names(tags), seconds)

    async def wake(
        self, owner: str, tags: AbstractSet[SleepTag], *, is_for_all: bool = False
    ) -> None:
        """Allocate memory with these tags again; once everything is awake, the sleep has ended.

        This also ends a sleep in mode `wait` whose samples still run.
        """
        if not self._sleeping:
            self._end("sleep", None if is_for_all else owner)
        async with self._lock:
            if self._sleeping and not (is_for_all or self._pauses.has(owner, "sleep")):
                raise Asleep("the engine sleeps for another API key")
            try:
                await self._wake(tags)
            except MemoryUnavailable as error:
                raise Asleep(f"{error}; the engine still sleeps: repeat the call later") from error
            if not self._sleeping:
                self._pauses.end_all("sleep")
                await self._resume_unless_paused()

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
                self._on_loaded(restored)

    def check_weights_awake(self) -> None:
        if WEIGHTS in self._sleeping:
            raise Asleep("the memory of the weights is released: wake the weights first")

    async def _end_leases(self) -> None:
        while True:
            await self._pauses.wait_until_one_ends()
            async with self._lock:
                await self._end_due_pauses()

    async def _end_due_pauses(self) -> None:
        for pause in self._pauses.ended():
            self._record_lease_end(pause)
            if pause.kind == "pause" or await self._wake_after_lease(pause):
                self._pauses.end(pause.owner, pause.kind)
        try:
            await self._resume_unless_paused()
        except EngineError as error:
            log.error("sampling was not resumed at the end of a pause: %s", error)

    def _record_lease_end(self, pause: Pause) -> None:
        """Log and count the end of a lease once, also if the wake is repeated."""
        if pause.kind == "sleep" and self._is_overdue:
            return
        self._is_overdue = pause.kind == "sleep" or self._is_overdue
        log.warning("the %s by %s has ended: its lease was not renewed", pause.kind, pause.owner)
        self._metrics.server.pause_leases_ended.inc()

    async def _wake_after_lease(self, sleep: Pause) -> bool:
        """Wake everything; without memory for it, the sleep goes on until the next attempt."""
        try:
            await self._wake(self._sleeping)
        except MemoryUnavailable as error:
            log.warning("the engine sleeps beyond the end of its lease: %s", error)
            self._pauses.start(sleep.owner, WAKE_RETRY_SECONDS, kind="sleep")
            return False
        except EngineError as error:
            log.error("the engine was not woken at the end of a sleep: %s", error)
        return True

    async def reset_prefix_cache(self) -> None:
        """Reset the engine's prefix cache; running samples keep their KV blocks."""
        async with self._lock:
            await self._engine.pause("keep")
            try:
                await self._engine.reset_prefix_cache()
            finally:
                await self._resume_unless_paused()

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
        self._metrics.weights.record_activation(answer)
        return answer

    async def _check_files(self, label: str, allow_rollback: bool) -> Version | None:
        """Check the files of a version before its activation ends the wait of another one.

        Returns the version, or None if it is active.
        """
        version = self._versions.check_activation(label, allow_rollback=allow_rollback)
        if version == self._versions.active:
            return None
        self.check_weights_awake()
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
                    self.check_weights_awake()
                if is_new and mode == "wait":
                    return await self._activate_when_idle(label, allow_rollback, kv)
                async with self._lock:
                    return await self._activate(label, mode, allow_rollback, kv)

    async def _activate_when_idle(
        self, label: str, allow_rollback: bool, kv: ActivationKv
    ) -> ActivationAnswer:
        """Activate once no rollout is sampling. Pauses can start and end during the wait."""
        async with self._rollouts.close_gate():
            while True:
                async with self._lock:
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
        self.check_weights_awake()
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
        if self.paused and not self._rollouts.is_idle:
            raise _frozen()

    async def _switch(
        self, version: Version, previous: Version, mode: ActivationMode, kv: ActivationKv
    ) -> ActivationAnswer:
        began = self._clock()
        pause: PauseMode = "abort" if mode == "abort" else "keep"
        await self._engine_pauses.pause(pause, recompute=mode == "recompute")
        try:
            await self._prompt_kv.before_weights_update()
            samples_ended = await self._rollouts.end_groups_bound_to_other_versions(version.label)
            num_kept_tokens = await self._load(version, kv)
        except EngineGone:
            raise  # the engine stays paused: partially loaded weights must not be used
        except (ServiceError, EngineError):
            await self._resume_unless_paused()
            raise
        await self._resume_unless_paused()
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
        self._prompt_kv.after_weights_update(label)

    async def _resume_unless_paused(self) -> None:
        await self._engine_pauses.resume_unless_paused()


def _names(tags: AbstractSet[SleepTag]) -> str:
    return " and ".join(sorted(tags))


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
