"""Release of a worker's memory during sleep: vLLM's sleep mode on GPU, page release on CPU.

On GPUs this is vLLM's sleep mode, whose allocator unmaps the memory. vLLM's CPU worker has none, so
the whole pages of the KV cache and of the weights are returned to the system here; they read as
zeros until they are written again. Level 1 keeps the weights (on a GPU in host memory), level 2
drops them, and the engine loads them again.

Call it while the engine is paused and no request has KV.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from engine.types.samples import KV_CACHE, WEIGHTS, SleepTag

MADV_DONTNEED: Final = 4


def sleep(worker: Any, level: int, tags: set[SleepTag]) -> None:
    """Release the memory with these tags: the KV cache, or the KV cache and the weights."""
    if worker.device.type != "cpu":
        if WEIGHTS in tags:
            worker.sleep(level)
        else:
            worker.discard((KV_CACHE,))
        return
    _release_pages(_kv_tensors(worker))
    if WEIGHTS in tags and level == 2:
        _drop_weights(worker.model_runner.get_model())


def missing_bytes(worker: Any, tags: set[SleepTag]) -> int:
    """Memory that a wake with these tags needs beyond what is free on the device; 0 on a CPU."""
    if worker.device.type == "cpu":
        return 0
    from vllm.device_allocator.cumem import CuMemAllocator

    allocations = CuMemAllocator.get_instance().pointer_to_data.values()
    torch.accelerator.empty_cache()
    free_bytes, _ = torch.accelerator.get_memory_info()
    return max(0, released_bytes(allocations, tags) - free_bytes)


def released_bytes(allocations: Iterable[Any], tags: set[SleepTag]) -> int:
    """Bytes of vLLM's allocations that a wake with these tags allocates again."""
    from vllm.device_allocator import DEFERRABLE_TAGS

    return sum(
        each.handle[1]
        for each in allocations
        if each.is_asleep and (each.tag in tags or each.tag not in DEFERRABLE_TAGS)
    )


def wake(worker: Any, tags: set[SleepTag]) -> None:
    """Allocate the memory with these tags again. Dropped weights are not loaded."""
    if worker.device.type == "cpu":
        return
    worker.wake_up(sorted(tags))
    if KV_CACHE in tags:
        for tensor in _kv_tensors(worker):
            tensor.zero_()  # a masked position must not be NaN


def _kv_tensors(worker: Any) -> Iterator[torch.Tensor]:
    for cache in worker.model_runner.kv_caches:
        yield from cache if isinstance(cache, (list, tuple)) else (cache,)


def _drop_weights(model: torch.nn.Module) -> None:
    """Release the weights of a model on CPU, with the copies that its linear kernels have packed.

    A reload packs them again.
    """
    layers: Iterator[Any] = model.modules()
    for layer in layers:
        if hasattr(layer, "cpu_linear"):
            layer.cpu_linear = None
    _release_pages(p.data for p in model.parameters() if _has_own_storage(p))
    _trim_heap()


def _has_own_storage(tensor: torch.Tensor) -> bool:
    """False for a view of a part of a storage, whose rest might not be loaded again."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def _release_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Return the whole pages of tensors to the system."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for address, num_bytes in sizes.items():
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > first:
            _madvise(first, end - first)


def _madvise(address: int, num_bytes: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if libc.madvise(address, num_bytes, MADV_DONTNEED) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _trim_heap() -> None:
    """Return freed heap memory to the system, with a C library that can do this."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
