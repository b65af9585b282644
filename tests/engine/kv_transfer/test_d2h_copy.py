"""Exports from a GPU: the thread that completes the copies, and the reader, without a GPU."""

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from engine.kv_transfer.worker import cache_blocks
from engine.kv_transfer.worker.cache_blocks import (
    ChunkedCopy,
    CopyThread,
    CudaBlockReader,
    CudaBlockWriter,
    layer_chunks,
)
from engine.runtime.feature_guard import Failure
from kernels.kv_block_copy import gather


class Transfer:
    """A torch event: `synchronize` returns when the transfer is complete."""

    def __init__(self, error: str | None = None) -> None:
        self.over = threading.Event()
        self._error = error

    def synchronize(self) -> None:
        assert self.over.wait(30)
        if self._error:
            raise RuntimeError(self._error)


def test_bytes_are_stored_in_order_and_flush_waits() -> None:
    copy_thread, failures = CopyThread(), list[Failure | None]()
    transfers, outs = [Transfer(), Transfer()], [torch.zeros(3), torch.zeros(3)]
    for i, (transfer, out) in enumerate(zip(transfers, outs, strict=True)):
        copy_thread.submit(torch.full((3,), i + 1.0), transfer, out, failures.append)
    waiting = threading.Thread(target=copy_thread.flush)
    waiting.start()
    transfers[1].over.set()
    waiting.join(0.1)
    assert waiting.is_alive()
    assert failures == [] and not outs[1].any()
    transfers[0].over.set()
    waiting.join(30)
    assert failures == [None, None]
    assert [out.tolist() for out in outs] == [[1.0] * 3, [2.0] * 3]


def test_failed_transfer_is_reported_and_the_next_one_completes() -> None:
    copy_thread, failures = CopyThread(), list[Failure | None]()
    broken, whole, out = Transfer("lost"), Transfer(), torch.zeros(3)
    for transfer in (broken, whole):
        transfer.over.set()
        copy_thread.submit(torch.ones(3), transfer, out, failures.append)
    copy_thread.flush()
    assert failures == [Failure("RuntimeError: lost"), None]
    assert out.tolist() == [1.0] * 3


def test_flush_without_transfers_returns_at_once() -> None:
    CopyThread().flush()


def test_copies_beyond_the_limit_wait_for_earlier_ones() -> None:
    copy_thread, transfer = CopyThread(max_pending_bytes=16), Transfer()
    copy_thread.wait_for_room(100)  # nothing is pending, so any size may start
    copy_thread.submit(torch.ones(3), transfer, torch.zeros(3), lambda _: None)
    copy_thread.wait_for_room(4)
    waiting = threading.Thread(target=copy_thread.wait_for_room, args=(5,))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    transfer.over.set()
    waiting.join(30)
    assert not waiting.is_alive()


def test_layers_are_copied_in_chunks_of_bounded_size() -> None:
    span = torch.zeros(5, 2, 2, 3, 4)
    assert [c.stop - c.start for c in layer_chunks(span, 2 * span[0].nbytes)] == [2, 2, 2]
    assert len(layer_chunks(span, 1)) == 5
    assert sum(len(span[chunk]) for chunk in layer_chunks(span, 2 * span[0].nbytes)) == 5


def test_chunked_copy_reports_its_first_failure_once() -> None:
    outcomes: list[Failure | None] = []
    copy = ChunkedCopy(4, outcomes.append)
    copy.finish(None)
    copy.finish(Failure("first"))
    copy.finish(Failure("second"), 1)
    assert outcomes == []
    copy.finish(None)
    assert outcomes == [Failure("first")]


class DoneEvent:
    def __init__(self, blocking: bool) -> None:
        assert blocking, "a thread that spins takes a core from the engine"

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    def __init__(self, device: torch.device) -> None: ...

    def wait_stream(self, other: Any) -> None: ...


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CUDA's streams, events and pinned memory, replaced by what the CPU has."""
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", DoneEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    for name in ("empty", "tensor"):
        create = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *a, pin_memory=False, create=create, **k: create(*a, **k)
        )
    monkeypatch.setattr(cache_blocks, "CHUNK_BYTES", 2 * 2 * 2 * 10 * 4 * 2)  # two layers
    yield


def caches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, 2, 4, 8, generator=generator).half() for _ in range(5)]


def test_reader_and_writer_copy_all_layers_of_a_prompt(on_cpu: None) -> None:
    source, target = caches(), [torch.zeros_like(cache) for cache in caches()]
    outcomes: list[Failure | None] = []
    out = torch.zeros(5, 2, 2, 10, 4, dtype=torch.float16)
    reader = CudaBlockReader(source)
    reader.copy([4, 1, 3], out, outcomes.append)
    reader.flush()
    assert outcomes == [None]
    CudaBlockWriter(target, None).write(out, 0, [0, 2, 5])
    for before, after in zip(source, target, strict=True):
        assert torch.equal(after[[0, 2]], before[[4, 1]])
        assert torch.equal(after[5, :, :2], before[3, :, :2]) and not after[5, :, 2:].any()


def test_export_without_room_fails_alone(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def failing_gather(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        gather(*args)

    monkeypatch.setattr(cache_blocks, "gather", failing_gather)
    reader, outcomes = CudaBlockReader(caches()), list[Failure | None]()
    for _ in range(2):
        reader.copy([4, 1, 3], torch.zeros(5, 2, 2, 10, 4).half(), outcomes.append)
    reader.flush()
    assert outcomes == [Failure("OutOfMemoryError: out of memory"), None]
