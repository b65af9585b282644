"""Changing the weights under running samples.

One activation at a time. The gate is shut from before the pause until the new version is active, so
nothing starts under one version and is judged by the other. Once begun, an activation runs to its
end whether or not its caller still listens. An operator's pause survives it.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from coppice.wire.weights import ActivationAnswer, ActivationMode
from engine.errors import EngineDead, EngineError, LoadFailed
from engine.protocol import Engine, PauseMode
from service.http.errors import ActivationFailed, EngineGone, ServiceError, VersionConflict
from service.prompt_kv.prompt_kv import PromptKvManager
from service.rollouts.manager import RolloutManager
from service.weights.stager import WeightStager
from service.weights.versions import Version, Versions

log = logging.getLogger(__name__)


class Activation:
    """Owns the engine's pause: operators pause through here as well."""

    def __init__(
        self,
        engine: Engine,
        versions: Versions,
        stager: WeightStager,
        rollouts: RolloutManager,
        prompt_kv: PromptKvManager,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._versions = versions
        self._stager = stager
        self._rollouts = rollouts
        self._prompt_kv = prompt_kv
        self._clock = clock
        self._lock = asyncio.Lock()
        self._paused = False

    @property
    def paused(self) -> bool:
        return self._paused

    async def pause(self, mode: PauseMode) -> None:
        async with self._lock:
            await self._engine.pause(mode)
            self._paused = True

    async def resume(self) -> None:
        async with self._lock:
            await self._engine.resume()
            self._paused = False

    async def reset_prefix_cache(self) -> None:
        """Samples that run keep what they hold."""
        async with self._lock:
            await self._engine.pause("keep")
            try:
                await self._engine.reset_prefix_cache()
            finally:
                await self._resume_unless_operator_paused()

    async def activate(
        self, label: str, mode: ActivationMode, *, allow_rollback: bool
    ) -> ActivationAnswer:
        async with self._lock:
            version = self._versions.check_activation(label, allow_rollback=allow_rollback)
            previous = self._versions.active
            if version == previous:
                return _answer(version, previous, mode, paused_seconds=0.0, samples_ended=0)
            await self._stager.revalidate(version)
            async with self._rollouts.close_gate():
                self._check_can_wait(mode)
                answer = await self._apply(version, previous, mode)
        await self._stager.trim()
        return answer

    def _check_can_wait(self, mode: ActivationMode) -> None:
        """Behind the gate, and rollouts rather than samples: those may not have started yet."""
        if mode == "wait" and self._paused and not self._rollouts.is_idle:
            raise VersionConflict("samples are paused and would never end: resume first")

    async def _apply(
        self, version: Version, previous: Version, mode: ActivationMode
    ) -> ActivationAnswer:
        if mode == "wait":
            await self._rollouts.wait_until_idle()
        began = self._clock()
        pause: PauseMode = "abort" if mode == "abort" else "keep"
        await self._engine.pause(pause, recompute=mode == "recompute")
        try:
            await self._prompt_kv.before_weights_update()
            samples_ended = await self._rollouts.end_groups_bound_to_other_versions(version.label)
            await self._load(version)
        except EngineGone:
            raise  # half-loaded weights must never run: the engine stays paused
        except (ServiceError, EngineError):
            await self._resume_unless_operator_paused()
            raise
        await self._resume_unless_operator_paused()
        seconds = self._clock() - began
        log.info("activated %s in %.3f s", version.label, seconds)
        return _answer(version, previous, mode, paused_seconds=seconds, samples_ended=samples_ended)

    async def _load(self, version: Version) -> None:
        try:
            await self._engine.update_weights(version.path, version.label)
        except LoadFailed as error:
            raise ActivationFailed(str(error)) from error
        except EngineDead as error:
            raise EngineGone(str(error)) from error
        self._versions.activated(version.label)
        self._prompt_kv.after_weights_update(version.label)

    async def _resume_unless_operator_paused(self) -> None:
        if not self._paused:
            await self._engine.resume()


def _answer(
    version: Version,
    previous: Version,
    mode: ActivationMode,
    *,
    paused_seconds: float,
    samples_ended: int,
) -> ActivationAnswer:
    return ActivationAnswer(
        version=version.label,
        sequence=version.sequence,
        previous=previous.label,
        mode=mode,
        paused_seconds=paused_seconds,
        samples_ended=samples_ended,
    )
