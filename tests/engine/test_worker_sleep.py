"""Release of memory in a worker: pages on a CPU, calls of vLLM's methods on a GPU."""

import inspect
import mmap
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from engine.types.samples import KV_CACHE, WEIGHTS
from engine.weights import worker_sleep

MIB = 2**20
PAGE = mmap.PAGESIZE


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def cpu_worker() -> Any:
    """A worker with 64 MiB of KV cache and 64 MiB of weights, 32 of them packed."""
    model = torch.nn.Sequential(torch.nn.Linear(4096, 2048, bias=False))
    packed = torch.ones(8 * MIB)
    model[0].cpu_linear = lambda x: x @ packed  # type: ignore[assignment]
    caches = [torch.ones(8 * MIB), [torch.ones(8 * MIB)]]
    runner = SimpleNamespace(kv_caches=caches, get_model=lambda: model)
    return SimpleNamespace(device=torch.device("cpu"), model_runner=runner)


@pytest.mark.parametrize(
    ("level", "tags", "released"),
    [
        (1, {KV_CACHE}, 64),
        (1, {KV_CACHE, WEIGHTS}, 64),
        (2, {KV_CACHE}, 64),
        (2, {KV_CACHE, WEIGHTS}, 128),
    ],
)
def test_pages_are_returned_to_the_system(level: int, tags: Any, released: int) -> None:
    worker = cpu_worker()
    before = resident_bytes()
    worker_sleep.sleep(worker, level, tags)
    assert (before - resident_bytes()) / MIB > released - 4
    worker_sleep.wake(worker, tags)
    first, (second,) = worker.model_runner.kv_caches
    weight = worker.model_runner.get_model()[0].weight
    for tensor, is_released in ((first, True), (second, True), (weight, released == 128)):
        inner = tensor.flatten()[PAGE:-PAGE]  # the first and the last page may be shared
        assert bool(inner.eq(0).all()) is is_released
        tensor.data.fill_(2)
        assert tensor.eq(2).all()


def test_parameter_that_is_a_part_of_a_storage_is_kept() -> None:
    worker = cpu_worker()
    storage = torch.ones(2 * MIB)
    worker.model_runner.get_model()[0].weight = torch.nn.Parameter(storage[:MIB])
    worker_sleep.sleep(worker, 2, {KV_CACHE, WEIGHTS})
    assert storage.eq(1).all()


def test_memory_next_to_the_pages_of_a_tensor_is_unchanged() -> None:
    storage = torch.ones(3 * 4096)
    before, released, after = storage[:4], torch.ones(100), storage[-4:]
    worker = cpu_worker()
    worker.model_runner.kv_caches = [released]
    worker_sleep.sleep(worker, 1, {KV_CACHE})
    assert before.eq(1).all() and after.eq(1).all()


class GpuWorker:
    """A worker with vLLM's methods of sleep mode, which records their calls."""

    device = torch.device("meta")

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []
        cache = torch.ones(4, device="cpu")
        self.model_runner = SimpleNamespace(kv_caches=[cache, [cache.clone()]])

    def sleep(self, level: int = 1) -> None:
        self.calls.append(("sleep", level))

    def discard(self, tags: tuple[str, ...]) -> None:
        self.calls.append(("discard", tags))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", tags))


def test_worker_of_a_gpu_uses_the_methods_of_vllm() -> None:
    worker = GpuWorker()
    worker_sleep.sleep(worker, 2, {WEIGHTS, KV_CACHE})
    worker_sleep.wake(worker, {WEIGHTS})
    assert worker.model_runner.kv_caches[0].eq(1).all()
    worker_sleep.wake(worker, {KV_CACHE})
    worker_sleep.sleep(worker, 1, {KV_CACHE})
    assert worker.calls == [
        *(("sleep", 2), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])),
        ("discard", ("kv_cache",)),
    ]
    first, (second,) = worker.model_runner.kv_caches
    assert first.eq(0).all() and second.eq(0).all()


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_calls_have_the_signatures_of_the_gpu_worker() -> None:
    from vllm.v1.worker.gpu_worker import Worker

    for name in ("sleep", "discard", "wake_up"):
        ours = inspect.signature(getattr(GpuWorker, name))
        assert str(ours) == str(inspect.signature(getattr(Worker, name)))


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_wake_needs_the_released_memory_with_its_tags() -> None:
    from vllm.device_allocator import AllocationData

    allocations = [
        AllocationData((0, 100, 0, 0), WEIGHTS, is_asleep=True),
        AllocationData((0, 30, 0, 0), KV_CACHE, is_asleep=True),
        AllocationData((0, 7, 0, 0), WEIGHTS),
        AllocationData((0, 1, 0, 0), "other", is_asleep=True),
    ]
    assert worker_sleep.released_bytes(allocations, {WEIGHTS}) == 101
    assert worker_sleep.released_bytes(allocations, {KV_CACHE}) == 31
    assert worker_sleep.missing_bytes(cpu_worker(), {WEIGHTS, KV_CACHE}) == 0
