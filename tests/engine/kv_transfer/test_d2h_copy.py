"""Exports from a GPU, without a GPU: the copy thread, the staging buffer, registered memory."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kv_transfer.worker import mapped_arena
from engine.kv_transfer.worker.cuda_block_exporter import (
    CudaBlockReader,
    contiguous_runs,
)
from engine.kv_transfer.worker.cuda_host_memory import WorkThread, registration_failure
from engine.kv_transfer.worker.mapped_arena import Arenas, SlotTarget
from engine.runtime.feature_guard import Failure
from engine.types.kv import ExportSlot
from kernels.kv_gather_cuda import LayerCaches, UnsupportedCaches, split_parts
from tests.engine.kv_transfer import fake_cuda
from tests.engine.kv_transfer.fake_cuda import (
    BLOCK,
    BLOCKS,
    HEADS,
    LAYERS,
    SIZE,
    TOKENS,
    Registry,
    caches,
    layout,
)
from tests.kernels.kv_layout_reference import slow_gather

CPU = torch.device("cpu")


def test_work_is_done_in_order_and_flush_waits() -> None:
    thread, over, done = WorkThread(CPU), threading.Event(), list[int]()
    thread.submit(lambda: assert_true(over.wait(30)))
    thread.submit(lambda: done.append(1))
    waiting = threading.Thread(target=thread.flush)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive() and not done
    over.set()
    waiting.join(30)
    assert done == [1]


def assert_true(value: bool) -> None:
    assert value


def test_failed_work_does_not_stop_the_thread() -> None:
    thread, done = WorkThread(CPU), list[int]()
    thread.submit(lambda: assert_true(False))
    thread.submit(lambda: done.append(1))
    thread.flush()
    assert done == [1]


def test_failure_of_a_call_is_raised_to_the_caller() -> None:
    thread = WorkThread(CPU)
    assert thread.call(max, 1, 2) == 2
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        thread.call(divmod, 1, 0)


def test_thread_uses_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise every rank would have a CUDA context on device 0."""
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    thread = WorkThread(torch.device("cuda", 3))
    thread.call(lambda: None)
    assert torch.device("cuda", 3) in devices


def test_flush_without_work_returns_at_once() -> None:
    WorkThread(CPU).flush()


@pytest.mark.parametrize("max_bytes", [7, 16, 80, 81, 160, 10**6])
def test_parts_cover_a_prompt_once_and_fit_the_buffer(max_bytes: int) -> None:
    parts = split_parts(20, 10, 7, max_bytes)
    covered = [
        (row, token)
        for part in parts
        for row in range(part.first_row, part.end_row)
        for token in range(part.first_token, part.end_token)
    ]
    assert covered == [(row, token) for row in range(20) for token in range(10)]
    assert all(part.num_rows * part.num_tokens * 7 <= max_bytes for part in parts)


def test_layers_that_differ_are_refused() -> None:
    same = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * SIZE)
    other = torch.zeros(BLOCKS, BLOCK, HEADS, 2 * SIZE).transpose(1, 2)
    for wrong, reason in ((same[:, :1], "shape"), (same.half(), "dtype"), (other, "strides")):
        with pytest.raises(UnsupportedCaches, match=f"layers 0 and 1 differ in .*{reason}"):
            LayerCaches.of([same, wrong])
    with pytest.raises(UnsupportedCaches, match="not contiguous"):
        LayerCaches.of([torch.zeros(BLOCKS, HEADS, 2 * SIZE, BLOCK).transpose(2, 3)])
    with pytest.raises(UnsupportedCaches, match="not aligned"):
        LayerCaches.of([torch.zeros(1, 1, 1, 6, dtype=torch.int8)])


@pytest.mark.parametrize("heads", [slice(0, 6), slice(2, 4)])
def test_runs_of_a_part_are_its_memory_in_order(heads: slice) -> None:
    whole = torch.arange(3 * 2 * 6 * 5 * 4, dtype=torch.int16).view(3, 2, 6, 5, 4)
    out = whole[:, :, heads]
    expected = out.reshape(-1, 5 * 4)
    for max_bytes in (5 * 4 * 2, 3 * 5 * 4 * 2, 2 * 4 * 2, 10**4):
        for part in split_parts(len(expected), 5, 4 * 2, max_bytes):
            runs = list(contiguous_runs(out, part))
            rows = expected[part.first_row : part.end_row].view(-1, 5, 4)
            values = rows[:, part.first_token : part.end_token].reshape(-1)
            assert torch.equal(torch.cat(runs).view(torch.int16), values)
            assert all(run.data_ptr() >= whole.data_ptr() for run in runs)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.install(monkeypatch)


def slot_of(tmp_path: Path, *, at: int = 0) -> ExportSlot:
    path = tmp_path / "arena"
    if not path.exists():
        path.touch()
        with path.open("r+b") as file:
            file.truncate(2**16)
    return ExportSlot(arena=path, offset=at + 64, status_offset=at, num_tokens=TOKENS)


def exported(reader: CudaBlockReader, target: SlotTarget) -> list[Failure | None]:
    outcomes: list[Failure | None] = []
    reader.copy([4, 1, 3], target, outcomes.append)
    reader.flush()
    return outcomes


@pytest.mark.parametrize(("rank", "num_ranks"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("registry", [Registry(), Registry(max_bytes=0), None])
def test_exports_equal_the_reference(
    on_cpu: None, tmp_path: Path, rank: int, num_ranks: int, registry: Registry | None
) -> None:
    """With registered memory, with memory that the driver refuses, and without a registry."""
    form = layout(num_ranks)
    arenas, source = Arenas(form, registry), caches()
    target = SlotTarget(arenas, slot_of(tmp_path), form.heads_to_write(rank))
    assert exported(CudaBlockReader(source), target) == [None]
    expected = torch.empty(LAYERS, 2, HEADS, TOKENS, SIZE).half()
    slow_gather(source, [4, 1, 3], expected)
    whole = arenas.kv(target.slot)
    assert torch.equal(whole[:, :, target.heads.start : target.heads.stop], expected)
    assert whole.count_nonzero() == expected.count_nonzero()
    assert registry is None or bool(registry.ranges) == (registry.max_bytes > 0)
    del whole
    arenas.close()
    assert registry is None or not registry.ranges


def test_transfers_do_not_cross_registered_chunks(
    on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_arena, "ARENA_CHUNK_BYTES", 4096)
    registry = Registry()
    arenas = Arenas(layout(), registry)
    target = SlotTarget(arenas, slot_of(tmp_path, at=4096 - 512), range(HEADS))
    out = target.open()
    base = out.data_ptr() - target.slot.offset
    flat = out.view(-1).view(torch.uint8)
    sizes = [len(part) for part in arenas.registered_parts(target.slot, flat) or []]
    assert sum(sizes) == flat.numel() and len(sizes) == 2
    at = target.slot.offset
    for size in sizes:
        assert at // 4096 == (at + size - 1) // 4096
        at += size
    assert sorted(registry.ranges) == sorted({base + 4096 * c for c in range(-(-at // 4096))})


def test_memory_is_registered_once(on_cpu: None, tmp_path: Path) -> None:
    registry, reader = Registry(), CudaBlockReader(caches())
    arenas = Arenas(layout(), registry)
    for _ in range(2):
        assert exported(reader, SlotTarget(arenas, slot_of(tmp_path), range(HEADS))) == [None]
        assert registry.num_registered == 1


def test_full_mount_is_tried_again(
    on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, reader = Registry(), CudaBlockReader(caches())
    arenas, allocate = Arenas(layout(), registry), os.posix_fallocate

    def refuse_chunks(file: int, offset: int, num_bytes: int) -> None:
        if num_bytes == 2**16:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(file, offset, num_bytes)

    target = SlotTarget(arenas, slot_of(tmp_path), range(HEADS))
    monkeypatch.setattr(os, "posix_fallocate", refuse_chunks)
    assert exported(reader, target) == [None] and not registry.ranges
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    assert exported(reader, target) == [None] and registry.ranges


def test_refused_registration_is_the_reason_of_indirect_copies() -> None:
    assert registration_failure(Registry()) is None
    assert registration_failure(Registry(max_bytes=0)) == "cudaHostRegister failed: 2"


def test_slot_outside_its_arena_fails_alone(
    on_cpu: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader, arenas = CudaBlockReader(caches()), Arenas(layout())
    outside = SlotTarget(arenas, slot_of(tmp_path, at=2**16), range(HEADS))
    [failure] = exported(reader, outside)
    assert failure is not None and "ArenaError" in failure.message
    assert caplog.text.count("ArenaError: ") == 1, "the other parts are not tried"
    assert exported(reader, SlotTarget(arenas, slot_of(tmp_path), range(HEADS))) == [None]


def test_export_without_room_fails_alone(
    on_cpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, arenas = CudaBlockReader(caches()), Arenas(layout())
    target = SlotTarget(arenas, slot_of(tmp_path), range(HEADS))
    create = torch.empty

    def refuse(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    assert exported(reader, target) == [Failure("OutOfMemoryError: out of memory")]
    monkeypatch.setattr(torch, "empty", create)
    assert exported(reader, target) == [None]


def test_failed_gather_fails_alone(on_cpu: None, tmp_path: Path) -> None:
    reader, arenas = CudaBlockReader(caches()), Arenas(layout())
    target = SlotTarget(arenas, slot_of(tmp_path), range(HEADS))
    failures: list[Failure | None] = []
    reader.copy([4, 1, 10**6], target, failures.append)
    assert exported(reader, target) == [None]
    assert len(failures) == 1 and failures[0] is not None


def test_steps_do_not_wait_for_exports(on_cpu: None, tmp_path: Path) -> None:
    """However many parts there are, and whatever the copy thread does."""
    reader, over, done = CudaBlockReader(caches()), threading.Event(), list[Failure | None]()

    class BlockedTarget(SlotTarget):
        def open(self) -> torch.Tensor:
            over.wait(30)
            return super().open()

    target = BlockedTarget(Arenas(layout()), slot_of(tmp_path), range(HEADS))
    for _ in range(20):
        reader.copy([4, 1, 3], target, done.append)
    assert not done
    over.set()
    reader.flush()
    assert done == [None] * 20
