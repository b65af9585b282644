"""CPU replacements of the parts of CUDA and Triton that copies of a GPU's KV use."""

from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch

from engine.kv_transfer.cache_layout import CacheLayout
from engine.kv_transfer.worker import cuda_block_exporter, cuda_block_loader, cuda_host_memory
from tests.kernels.kv_layout_reference import gather_part_by_layer, scatter_part_by_vector

LAYERS, BLOCKS, HEADS, BLOCK, SIZE, TOKENS = 5, 6, 2, 4, 4, 10
ROW_BYTES = TOKENS * SIZE * 2


class DoneEvent:
    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking

    def record(self) -> None: ...

    def synchronize(self) -> None:
        assert self.blocking, "a thread that spins takes a core from the engine"


class Stream:
    def __init__(self, device: torch.device) -> None: ...

    def wait_event(self, event: DoneEvent) -> None: ...


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace streams, events, pinned memory and the Triton kernels; parts have three rows."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", DoneEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    for name in ("empty", "tensor"):
        create = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, pin_memory=False, create=create, **k: create(*a, **k)
        )
    monkeypatch.setattr(cuda_block_exporter, "gather_part", gather_part_by_layer)
    monkeypatch.setattr(cuda_block_exporter, "STAGING_BYTES", 3 * ROW_BYTES)
    monkeypatch.setattr(cuda_block_loader, "scatter_part", scatter_part_by_vector)
    monkeypatch.setattr(cuda_block_loader, "PINNED_BYTES", 3 * ROW_BYTES)
    for module in (cuda_block_loader, cuda_host_memory):
        monkeypatch.setattr(module, "get_accelerator_view_from_cpu_tensor", lambda memory: memory)


@dataclass(slots=True)
class Registry:
    """The driver's registration of host memory; refuses what does not fit."""

    max_bytes: int = 2**40
    ranges: dict[int, int] = field(default_factory=dict)
    num_registered: int = 0

    def register(self, address: int, num_bytes: int) -> None:
        if sum(self.ranges.values()) + num_bytes > self.max_bytes:
            raise RuntimeError("cudaHostRegister failed: 2")
        self.ranges[address] = num_bytes
        self.num_registered += 1

    def unregister(self, address: int) -> None:
        del self.ranges[address]


def caches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (BLOCKS, HEADS, BLOCK, 2 * SIZE)
    return [torch.randn(shape, generator=generator).half() for _ in range(LAYERS)]


def layout(num_ranks: int = 1) -> CacheLayout:
    return CacheLayout(
        group=0,
        layers=tuple(f"layers.{i}" for i in range(LAYERS)),
        num_kv_heads=HEADS * num_ranks,
        head_dim=SIZE,
        dtype=torch.float16,
        block_size=BLOCK,
        num_ranks=num_ranks,
    )
