"""Loads into a GPU, without a GPU: registered memory, pinned buffers, failures."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kv_transfer.jobs import LoadJob
from engine.kv_transfer.worker import cuda_block_loader, cuda_host_memory
from engine.kv_transfer.worker.cuda_block_loader import CudaBlockLoader, PinnedRing
from engine.kv_transfer.worker.cuda_host_memory import direct_read_failure
from engine.kv_transfer.worker.loader import Loader
from engine.kv_transfer.worker.mapped_arena import Arenas
from engine.runtime.feature_guard import Feature
from engine.types.kv import ExportSlot, LoadPiece
from kernels.rope_shift import parse_rotary
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
from tests.kernels.kv_layout_reference import slow_gather, slow_scatter
from tests.kernels.rope_shift_reference import slow_shift

ROTARY = parse_rotary({"rope_theta": 10000.0}, SIZE)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_cuda.install(monkeypatch)


def span_of(num_heads: int = HEADS, num_tokens: int = TOKENS) -> torch.Tensor:
    """Some heads and tokens of a larger prompt, which are not contiguous."""
    whole = torch.randn(LAYERS, 2, num_heads + 1, num_tokens + 5, SIZE).half()
    return whole[:, :, 1:, 3 : num_tokens + 3]


@pytest.mark.parametrize("shift", [0, 9])
@pytest.mark.parametrize("is_registered", [True, False])
def test_spans_are_written_and_their_keys_rotated(is_registered: bool, shift: int) -> None:
    source, ours, expected = span_of(), caches(), [cache.double() for cache in caches()]
    moved = source.double()
    moved[:, 0] = slow_shift(source[:, 0].contiguous(), shift, ROTARY)
    slow_scatter(moved, expected, [4, 1, 3])
    writer = CudaBlockLoader(ours, ROTARY)
    writer.write(source, shift, [4, 1, 3], is_registered=is_registered)
    writer.flush()
    for cache, want in zip(ours, expected, strict=True):
        torch.testing.assert_close(cache.double(), want, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("max_vectors", [4, 40])
def test_long_rows_are_copied_in_parts(monkeypatch: pytest.MonkeyPatch, max_vectors: int) -> None:
    monkeypatch.setattr(cuda_block_loader, "PINNED_BYTES", max_vectors * SIZE * 2)
    source, ours, expected = span_of(), caches(), caches()
    slow_scatter(source, expected, [4, 1, 3])
    CudaBlockLoader(ours, None).write(source, 0, [4, 1, 3], is_registered=False)
    assert all(torch.equal(cache, want) for cache, want in zip(ours, expected, strict=True))


def test_warm_up_changes_nothing() -> None:
    ours = caches()
    for rotary in (None, ROTARY):
        CudaBlockLoader(ours, rotary).warm_up()
    assert all(torch.equal(cache, want) for cache, want in zip(ours, caches(), strict=True))


def test_pinned_buffer_is_used_again_after_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ring, waited = PinnedRing(64, 2), list[int]()
    taken = [ring.take(), ring.take()]
    for number, buffer in enumerate(taken):
        monkeypatch.setattr(buffer.read, "synchronize", lambda n=number: waited.append(n))
    assert [ring.take() for _ in range(3)] == [taken[0], taken[1], taken[0]]
    assert waited == [0, 1, 0]


def refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("CUDA error: out of memory")


def test_ring_uses_the_pinned_memory_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = PinnedRing(64, 3)
    only = ring.take()
    monkeypatch.setattr(torch, "empty", refuse)
    assert ring.take() is only and ring.take() is only
    with pytest.raises(torch.OutOfMemoryError):
        PinnedRing(64, 3).take()


def test_reason_of_a_second_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry()
    assert direct_read_failure(registry) is None and registry.num_registered == 1
    assert direct_read_failure(Registry(max_bytes=0)) == "cudaHostRegister failed: 2"
    monkeypatch.setattr(
        cuda_host_memory, "get_accelerator_view_from_cpu_tensor", lambda memory: memory[1:]
    )
    reason = direct_read_failure(registry)
    assert reason is not None and "addresses" in reason and not registry.ranges


@pytest.fixture
def slot(tmp_path: Path) -> ExportSlot:
    """Slot of an arena with exported KV."""
    path = tmp_path / "arena"
    path.touch()
    with path.open("r+b") as file:
        file.truncate(2**16)
    slot = ExportSlot(arena=path, offset=64, status_offset=0, num_tokens=TOKENS)
    arenas = Arenas(layout())
    slow_gather(caches(), [4, 1, 3], arenas.kv(slot))
    arenas.close()
    return slot


def loader_of(
    monkeypatch: pytest.MonkeyPatch, blocks: Sequence[torch.Tensor], registry: Registry
) -> Loader:
    monkeypatch.setattr("engine.kv_transfer.worker.loader.current_platform.is_cpu", lambda: False)
    monkeypatch.setattr(cuda_host_memory, "CudaHostMemory", lambda device: registry)
    loader = Loader(layout(), 0, Feature("kv_reuse"))
    loader.register(dict(zip(layout().layers, blocks, strict=True)))
    loader.prepare({}, ROTARY)
    return loader


def job_of(slot: ExportSlot) -> LoadJob:
    piece = LoadPiece(source=slot, token_offset=0, num_tokens=TOKENS, start=0, shift=0)
    return LoadJob(pieces=(piece,), block_ids=tuple(range(math.ceil(TOKENS / BLOCK))))


@pytest.mark.parametrize("max_bytes", [2**40, 0])
def test_export_is_loaded(
    monkeypatch: pytest.MonkeyPatch, slot: ExportSlot, max_bytes: int
) -> None:
    """Read where it is, or through pinned memory if the driver does not register it."""
    blocks = [torch.zeros(BLOCKS, HEADS, BLOCK, 2 * SIZE).half() for _ in range(LAYERS)]
    registry = Registry(max_bytes=max_bytes)
    loader = loader_of(monkeypatch, blocks, registry)
    loader.load(job_of(slot))
    assert loader.take_failed_blocks() == set() and bool(registry.ranges) == (max_bytes > 0)
    for cache, source in zip(blocks, caches(), strict=True):
        assert torch.equal(cache[:2], source[[4, 1]])
        assert torch.equal(cache[2, :, :2], source[3, :, :2]) and not cache[3:].any()
    loader.close()
    assert not registry.ranges


def test_memory_is_registered_once(monkeypatch: pytest.MonkeyPatch, slot: ExportSlot) -> None:
    registry = Registry()
    loader = loader_of(monkeypatch, caches(), registry)
    for _ in range(2):
        loader.load(job_of(slot))
        assert registry.num_registered == 2, "one of them is the page that was tried first"


def test_load_without_memory_fails_alone(monkeypatch: pytest.MonkeyPatch, slot: ExportSlot) -> None:
    loader = loader_of(monkeypatch, caches(), Registry(max_bytes=0))
    with monkeypatch.context() as full:
        full.setattr(torch, "empty", refuse)
        loader.load(job_of(slot))
    assert loader.take_failed_blocks() == {0, 1, 2} and loader.take_step_failed()
    loader.load(job_of(slot))
    assert loader.take_failed_blocks() == set()
