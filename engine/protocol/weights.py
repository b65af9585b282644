"""Protocol of an engine's weights methods: update, transfer, adapters, pause, sleep."""

from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Protocol

from engine.protocol.info_and_health import EngineState
from engine.types.samples import AdapterInfo, PauseMode, SleepLevel, SleepTag
from engine.weights.ipc_tensors import IpcTensors
from engine.weights.magnitudes import UNKNOWN, Magnitudes


class Weights(EngineState, Protocol):
    """Replacement of the served weights, while the engine is paused, and release of memory.

    pause/resume: idempotent. After pause no token is sampled. submit still accepts samples, which
        wait. `recompute` drops the KV cache of frozen samples, which is prefilled again after
        resume. `wait` and `abort` let samples continue that `keep` has frozen. A pause in mode
        `wait` may be cancelled; pause or resume next.
    reset_prefix_cache: call while paused. No prefix that was prefilled earlier is found again.
    sleep: call while awake, and paused with `recompute`, with exports flushed. Releases the memory
        of the KV cache, and of the weights if `tags` has them: level 1 keeps them in host memory,
        level 2 drops them. LoadFailed: the weights could not be loaded again, and nothing was
        released. Only while `info.can_sleep`. Do not resume, load weights or load adapters before
        wake.
    wake: allocates the memory with these tags. MemoryUnavailable: it is not free on the device,
        and nothing has changed. As soon as everything is awake, dropped weights and adapters are
        loaded again, unless others were loaded meanwhile. Instead of weights without files the last
        files are loaded, and their version is stamped and returned. EngineDead: the engine must not
        be resumed. Tags that are awake are ignored.
    check_weights: raises CheckpointRefused if the files could not be served. Changes nothing. May
        block for seconds, so call it outside the event loop. `magnitudes` are those of the tensors
        of a single file, as far as they are known: these values are not read again.
    update_weights: call while paused; the caller resumes. Loads validated files, resets the prefix
        cache and stamps `version` on every token sampled from then on. With `keep_kv`, the prefixes
        of requests with `kept_kv` stay in the cache, and the number of their tokens is returned;
        else 0. LoadFailed: the previous weights are restored. EngineDead: they are not, and the
        engine must not be resumed. Adapters stay loaded and apply to the new weights.
    check_tensors: as check_weights, for tensors in a trainer's GPU memory, without their values.
    open_transfer: opens such tensors on all ranks and checks their values, if settings enable it,
        also while samples run. CheckpointRefused: none are open. LoadFailed: the files to be loaded
        after a failed load have changed. Call transfer_weights or close_transfer afterwards.
    close_transfer: closes the open tensors; none need be open.
    transfer_weights: as update_weights, with the open tensors, which it closes. FilesRestored,
        also of update_weights: the previous version had no files, and an earlier one is served and
        stamped. Its files must not change until others are loaded.
    check_adapter: as check_weights, for the directory of a LoRA adapter.
    load_adapter: loads a validated directory under a label that is not in use; at most
        `info.max_adapters`. The directory must not change until the adapter is unloaded. Samples
        keep running. A reused label never matches prefixes cached under its earlier adapter.
        LoadFailed: nothing has changed.
    unload_adapter: no sample may run under the adapter. Unknown labels are ignored.
    """

    async def pause(self, mode: PauseMode, *, recompute: bool = False) -> None: ...

    async def resume(self) -> None: ...

    async def reset_prefix_cache(self) -> None: ...

    async def sleep(self, level: SleepLevel, tags: AbstractSet[SleepTag]) -> None: ...

    async def wake(self, tags: AbstractSet[SleepTag]) -> str | None: ...

    def check_weights(self, path: Path, magnitudes: Magnitudes = UNKNOWN) -> None: ...

    async def update_weights(self, path: Path, version: str, *, keep_kv: bool = False) -> int: ...

    def check_tensors(self, tensors: IpcTensors) -> None: ...

    async def open_transfer(self, tensors: IpcTensors) -> None: ...

    async def close_transfer(self) -> None: ...

    async def transfer_weights(self, version: str, *, keep_kv: bool = False) -> int: ...

    def check_adapter(self, path: Path) -> AdapterInfo: ...

    async def load_adapter(self, label: str, path: Path) -> None: ...

    async def unload_adapter(self, label: str) -> None: ...
