"""An engine whose ranks keep exported KV in "GPU memory", which is memory of the test's process.

The calls of CUDA IPC and CUDA are replaced where the client and the workers call PyTorch's modules.
"""

import base64
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from engine.types.info import EngineInfo
from engine.types.kv import ExportStatus, GpuIpc, GpuMemory
from engine.types.samples import SampleRequest
from tests.fake_engine import FakeEngine
from tests.fake_export import FORMAT, fake_kv

NUM_BYTES = 2**23
NUM_RANKS = FORMAT.num_kv_heads
"""Each rank has one KV head."""


def gpu_name(rank: int) -> str:
    return f"GPU-{rank}"


class GpuEngine(FakeEngine):
    """A fake engine whose ranks also keep exports in their GPU memory."""

    def __init__(self, *, num_bytes: int = NUM_BYTES, **options: Any) -> None:
        super().__init__(prompt_kv=True, **options)
        self.memories = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(NUM_RANKS)]

    @property
    def info(self) -> EngineInfo:
        ranks = tuple(self._describe(rank, memory) for rank, memory in enumerate(self.memories))
        return replace(super().info, kv_gpu_memory=ranks)

    def _describe(self, rank: int, memory: torch.Tensor) -> GpuMemory:
        return GpuMemory(
            gpu=gpu_name(rank),
            num_bytes=memory.numel(),
            first_head=rank,
            num_heads=1,
            ipc=GpuIpc(
                handle=base64.b64encode(bytes([rank])).decode(),
                num_bytes=memory.numel(),
                offset=512,
                ref_counter="",
                ref_counter_offset=3,
                event="",
                event_sync_required=True,
            ),
        )

    def _export(self, request: SampleRequest) -> None:
        super()._export(request)
        slot = request.export
        if slot is None or slot.gpu_offset is None or self.export_status != ExportStatus.COMMITTED:
            return
        kv = fake_kv(request.prompt_token_ids[: slot.num_tokens], self.version)
        for rank, memory in enumerate(self.memories):
            data = torch.from_numpy(kv[:, :, rank : rank + 1].copy()).view(-1).view(torch.uint8)
            memory[slot.gpu_offset : slot.gpu_offset + len(data)] = data


@dataclass(slots=True)
class FakeCuda:
    """PyTorch's view of the GPUs of a process; `visible` are the UUIDs of its GPUs."""

    engine: GpuEngine
    visible: list[str] = field(
        default_factory=lambda: [gpu_name(i) for i in range(NUM_RANKS)][::-1]
    )
    opened: list[tuple[int, bytes]] = field(default_factory=list)
    error: Exception | None = None

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.visible))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda index: SimpleNamespace(uuid=self.visible[index]),
        )
        monkeypatch.setattr(reductions, "rebuild_cuda_tensor", self.rebuild)

    def rebuild(self, *arguments: Any) -> torch.Tensor:
        """Checks the arguments as `rebuild_cuda_tensor` names them."""
        cls, size, stride, offset, storage, dtype, index, handle, num_bytes, start = arguments[:10]
        requires_grad, counter, counter_offset, event, synchronize = arguments[10:]
        if self.error is not None:
            raise self.error
        assert (cls, stride, offset, dtype) == (torch.Tensor, (1,), 0, torch.uint8)
        assert storage is torch.storage.TypedStorage and not requires_grad
        assert (counter, counter_offset, event, synchronize, start) == (b"", 3, b"", True, 512)
        memory: torch.Tensor = self.engine.memories[handle[0]]
        assert size == (num_bytes,) == tuple(memory.shape)
        self.opened.append((index, handle))
        return memory
