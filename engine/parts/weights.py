"""Mixin of the vLLM engine for weights: pause, update, sleep, LoRA adapters."""

import asyncio
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from engine.adapters.feature import Adapters
from engine.launch.model_files import resolve_served_model
from engine.parts.state import VllmState
from engine.runtime.await_engine import await_engine
from engine.types.samples import AdapterInfo, PauseMode, SleepLevel, SleepTag
from engine.weights.checkpoint import NO_TENSORS, read_base_checkpoint
from engine.weights.ipc_tensors import IpcTensor
from engine.weights.magnitudes import UNKNOWN, Magnitudes
from engine.weights.sleep_mode import SleepMode
from engine.weights.updates import ServedWeights
from engine.weights.validation import check_adapter


class VllmWeights(VllmState):
    """The `engine.protocol.weights.Weights` of vLLM."""

    _weights: ServedWeights
    _sleep_mode: SleepMode

    async def _open_weights(self, version: str) -> Path:
        """Read the model's files, without the values of their tensors; returns their directory."""
        model = await asyncio.to_thread(resolve_served_model, self._settings)
        checkpoint = NO_TENSORS
        if not self._settings.has_random_weights:
            checkpoint = await asyncio.to_thread(read_base_checkpoint, model)
        self._weights = ServedWeights(
            self._processes,
            self._heartbeat,
            model,
            checkpoint,
            version=version,
            is_on_several_machines=self._settings.uses_several_machines,
        )
        self._sleep_mode = SleepMode(
            self._processes, self._heartbeat, self._weights, self._features
        )
        return model

    async def pause(self, mode: PauseMode, *, recompute: bool = False) -> None:
        """Pause between two steps.

        vLLM's `pause_generation` then sleeps for 20 ms, so that its caller receives the last
        outputs of ended requests first. The mode `keep` ends none, and EngineCore sets the weights
        version of each output.
        """
        if mode == "keep" and not recompute:
            pausing = self.llm.engine_core.pause_scheduler_async(mode, clear_cache=False)
        else:
            pausing = self.llm.pause_generation(mode=mode, clear_cache=recompute)
        await await_engine(self.llm, pausing)

    async def resume(self) -> None:
        await await_engine(self.llm, self.llm.resume_generation())

    async def reset_prefix_cache(self) -> None:
        await self._processes.call_cores("coppice_reset_prefix_cache")

    def check_weights(self, path: Path, magnitudes: Magnitudes = UNKNOWN) -> None:
        self._weights.check(path, dtype=self.info.dtype, magnitudes=magnitudes)

    def check_tensors(self, tensors: Sequence[IpcTensor]) -> None:
        self._weights.check_tensors(tensors)

    async def update_weights(self, path: Path, version: str, *, keep_kv: bool = False) -> int:
        return await self._weights.update(path, version, keep_kv=keep_kv)

    async def open_transfer(self, tensors: Sequence[IpcTensor]) -> None:
        await self._weights.open_transfer(tensors)

    async def close_transfer(self) -> None:
        await self._weights.close_transfer()

    async def transfer_weights(self, version: str, *, keep_kv: bool = False) -> int:
        return await self._weights.transfer(version, keep_kv=keep_kv)

    async def sleep(self, level: SleepLevel, tags: AbstractSet[SleepTag]) -> None:
        await self._sleep_mode.sleep(level, tags)

    async def wake(self, tags: AbstractSet[SleepTag]) -> str | None:
        return await self._sleep_mode.wake(tags)

    def check_adapter(self, path: Path) -> AdapterInfo:
        base, max_rank = self._weights.checkpoint, self.info.max_adapter_rank
        return check_adapter(base, path, max_rank=max_rank, dtype=self.info.dtype)

    async def load_adapter(self, label: str, path: Path) -> None:
        await self._features.of(Adapters).load(label, path)

    async def unload_adapter(self, label: str) -> None:
        await self._features.of(Adapters).unload(label)
