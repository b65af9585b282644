"""GPU memory in which a rank's exported KV stays, without a GPU."""

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions
from vllm.platforms import current_platform

from engine.kv_transfer.jobs import ExportJob
from engine.kv_transfer.worker import cuda_host_memory
from engine.kv_transfer.worker.export_writer import ExportWriter
from engine.kv_transfer.worker.gpu_arena import GpuArena
from engine.runtime.feature_guard import Feature
from engine.types.kv import ExportSlot, ExportStatus, GpuMemory
from tests.engine.kv_transfer import fake_cuda
from tests.engine.kv_transfer.fake_cuda import HEADS, LAYERS, SIZE, TOKENS, Registry, caches, layout
from tests.kernels.kv_layout_reference import slow_gather

CPU = torch.device("cpu")
PART_BYTES = LAYERS * 2 * HEADS * TOKENS * SIZE * 2
BLOCKS_OF_PROMPT = (4, 1, 3)


def shared(memory: torch.Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Result of PyTorch's reduce_tensor for a tensor on a GPU."""
    size = memory.untyped_storage().nbytes()
    first = (torch.Tensor, memory.size(), memory.stride(), 0, torch.storage.TypedStorage)
    second = (memory.dtype, 0, b"handle", size, 512, False, b"counter", 7, b"event", True)
    return reductions.rebuild_cuda_tensor, (*first, *second)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(reductions, "reduce_tensor", shared)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1")
    )
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(cuda_host_memory, "CudaHostMemory", lambda device: Registry())


def test_memory_is_described_by_pytorchs_serialization() -> None:
    memory = GpuArena(4096, CPU, range(2, 4)).info()
    assert (memory.gpu, memory.num_bytes, memory.first_head, memory.num_heads) == (
        *("GPU-1", 4096),
        *(2, 2),
    )
    ipc = memory.ipc
    texts = [base64.b64decode(text) for text in (ipc.handle, ipc.ref_counter, ipc.event)]
    assert texts == [b"handle", b"counter", b"event"]
    assert (ipc.num_bytes, ipc.offset, ipc.ref_counter_offset) == (4096, 512, 7)
    assert ipc.event_sync_required
    assert GpuMemory.from_dict(memory.to_dict()) == memory


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 8), (0, 0), (4090, 8), (0, 4097)])
def test_part_outside_the_memory_is_refused(offset: int, num_bytes: int) -> None:
    with pytest.raises(ValueError, match="outside the GPU memory"):
        GpuArena(4096, CPU, range(2)).part(offset, num_bytes)


def writer(*, gpu_bytes: int, rank: int = 0, num_ranks: int = 1) -> ExportWriter:
    made = ExportWriter(layout(num_ranks), rank, Feature("kv"))
    made.register(dict(zip(layout().layers, caches(), strict=True)))
    made.prepare({}, gpu_bytes=gpu_bytes)
    return made


def exported(made: ExportWriter, tmp_path: Path, gpu_offset: int | None) -> ExportStatus:
    path = tmp_path / "arena"
    path.write_bytes(bytes(2**16))
    slot = ExportSlot(
        arena=path, offset=64, status_offset=0, num_tokens=TOKENS, gpu_offset=gpu_offset
    )
    made.export(
        ExportJob(target_slot=slot, block_ids=BLOCKS_OF_PROMPT, status=ExportStatus.COMMITTED)
    )
    made.flush()
    return ExportStatus(path.read_bytes()[8 * made._rank])


def reference() -> torch.Tensor:
    expected = torch.empty(LAYERS, 2, HEADS, TOKENS, SIZE).half()
    slow_gather(caches(), list(BLOCKS_OF_PROMPT), expected)
    return expected


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (1, 2)])
def test_export_stays_on_the_gpu_and_is_copied(tmp_path: Path, rank: int, num_ranks: int) -> None:
    """Only this rank's heads stay there, without gaps."""
    made = writer(gpu_bytes=3 * PART_BYTES, rank=rank, num_ranks=num_ranks)
    assert made.gpu_arena is not None and made.indirect_reason is None
    assert exported(made, tmp_path, PART_BYTES) == ExportStatus.COMMITTED
    data = made.gpu_arena.part(PART_BYTES, PART_BYTES).view(torch.float16)
    assert torch.equal(data.view(reference().shape), reference())
    copied = torch.frombuffer(bytearray((tmp_path / "arena").read_bytes()), dtype=torch.float16)
    heads = HEADS * num_ranks
    whole = copied[32:][: LAYERS * 2 * heads * TOKENS * SIZE].view(LAYERS, 2, heads, TOKENS, SIZE)
    assert torch.equal(whole[:, :, rank * HEADS : (rank + 1) * HEADS], reference())
    made.close()


def test_export_without_a_part_uses_no_gpu_memory(tmp_path: Path) -> None:
    made = writer(gpu_bytes=PART_BYTES)
    assert made.gpu_arena is not None
    made.gpu_arena.part(0, PART_BYTES).fill_(0xAB)
    assert exported(made, tmp_path, None) == ExportStatus.COMMITTED
    assert (made.gpu_arena.part(0, PART_BYTES) == 0xAB).all()
    made.close()


def test_gpu_without_room_exports_to_shared_memory_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = torch.empty

    def refuse(*sizes: Any, **options: Any) -> torch.Tensor:
        if sizes[0] == PART_BYTES:
            raise torch.OutOfMemoryError("out of memory")
        return create(*sizes, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    made = writer(gpu_bytes=PART_BYTES)
    assert made.gpu_arena is None and made.gpu_arena_failure == "OutOfMemoryError: out of memory"
    assert exported(made, tmp_path, None) == ExportStatus.COMMITTED
    made.close()


def test_driver_that_refuses_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_host_memory, "CudaHostMemory", lambda device: Registry(max_bytes=0))
    made = writer(gpu_bytes=0)
    assert made.indirect_reason == "cudaHostRegister failed: 2" and made.gpu_arena is None
    assert exported(made, tmp_path, None) == ExportStatus.COMMITTED
    made.close()
