"""Prompt KV on a GPU: readers and writers of the cache, and exports and loads of an engine."""

import multiprocessing
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice.prompt_kv import gpu_kv
from coppice.wire.prompt_kv import KvGpuMemory
from coppice.wire.rollouts import PromptSpan
from engine.kv_transfer.cache_layout import CacheLayout
from engine.kv_transfer.worker.mapped_arena import Arenas, SlotTarget
from engine.runtime.feature_guard import Failure
from engine.types.kv import ExportSlot
from kernels.rope_shift import parse_rotary
from tests.arena import TestArena
from tests.engine.kv_transfer.export_models import (
    COMMITTED,
    EXPORTING,
    kv_format,
    max_error,
    reference,
    reference_kv,
    save_model,
)
from tests.engine.kv_transfer.load_chains import Chains
from tests.engine.seedling import teacher_forced
from tests.engine.stepped_engine import LiveEngine
from tests.gpu.device import CAN_RUN, DEVICE, ON_GPU
from tests.gpu.live import DTYPE, LOGPROB_TOLERANCE, engine
from tests.kernels.kv_layout_reference import slow_gather
from tests.kernels.rope_shift_reference import slow_shift

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CAN_RUN, reason="no GPU"),
    pytest.mark.filterwarnings("ignore"),
]
cuda_only = pytest.mark.skipif(not ON_GPU, reason="copies of CUDA streams need a GPU")

LAYERS, HEADS, BLOCK, SIZE, NUM_BLOCKS = 2, 2, 32, 32, 16
ROTARY = parse_rotary({"rope_theta": 10000.0}, SIZE)
ROTARY_OF_USUAL = parse_rotary({"rope_theta": 1000000.0}, 128)
KV_TOLERANCE = 0.1
"""Of bfloat16: keys and values of the models here are at most about 8."""
PROMPTS = [[(7 * i) % 500 for i in range(230)], [9, 8], [(5 * i) % 400 for i in range(65)]]


def caches() -> list[torch.Tensor]:
    shape = (LAYERS, NUM_BLOCKS, BLOCK, HEADS, 2 * SIZE)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    return [layer.transpose(1, 2) for layer in values.to(DEVICE)]


@dataclass(frozen=True, slots=True)
class MemoryTarget:
    """Memory that is not registered with the driver, so it is filled through pinned memory."""

    memory: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.memory.shape[3]

    @property
    def gpu_offset(self) -> int | None:
        return None

    def open(self) -> torch.Tensor:
        return self.memory

    def registered_parts(self, memory: torch.Tensor) -> list[torch.Tensor] | None:
        return None


@cuda_only
def test_blocks_are_read_after_the_step_that_fills_them() -> None:
    """The thread that runs steps does not wait, neither for its step nor for the copies."""
    from engine.kv_transfer.worker.cuda_block_exporter import CudaBlockReader

    on_device, failures = caches(), list[Failure | None]()
    filled = [cache.cpu().clone() for cache in on_device]
    for cache in on_device:
        cache.zero_()
    reader, outs = CudaBlockReader(on_device), []
    reader.warm_up()
    tables = [[i % NUM_BLOCKS, (i + 5) % NUM_BLOCKS] for i in range(32)]
    torch.cuda._sleep(10**8)  # type: ignore[no-untyped-call]
    for cache, values in zip(on_device, filled, strict=True):
        cache.copy_(values.to(DEVICE, non_blocking=True))
    for blocks in tables:
        out = torch.zeros(LAYERS, 2, HEADS, 2 * BLOCK - 7, SIZE, dtype=torch.bfloat16)
        reader.copy(blocks, MemoryTarget(out), failures.append)
        outs.append(out)
    reader.flush()
    assert failures == [None] * len(tables)
    for blocks, out in zip(tables, outs, strict=True):
        want = torch.empty_like(out)
        slow_gather(filled, blocks, want)
        assert torch.equal(out, want)


USUAL = CacheLayout(
    group=0,
    layers=tuple(f"layers.{i}" for i in range(28)),
    num_kv_heads=8,
    head_dim=128,
    dtype=torch.bfloat16,
    block_size=BLOCK,
    num_ranks=1,
)
"""KV cache of a model of 1.7 billion parameters."""


@cuda_only
@pytest.mark.parametrize("is_registered", [True, False])
def test_prompt_of_a_usual_size_is_read_and_written(is_registered: bool, tmp_path: Path) -> None:
    """230 MiB, which no single transfer takes, into eight registered chunks of an arena."""
    from engine.kv_transfer.worker.cuda_block_exporter import CudaBlockReader
    from engine.kv_transfer.worker.cuda_block_loader import CudaBlockLoader
    from engine.kv_transfer.worker.cuda_host_memory import CudaHostMemory

    num_tokens = 2048
    shape = (28, num_tokens // BLOCK, BLOCK, 8, 2 * 128)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    on_device = [layer.transpose(1, 2) for layer in values.to(DEVICE)]
    blocks = list(range(num_tokens // BLOCK))[::-1]
    path = Path("/dev/shm") / f"coppice-kv-test-{tmp_path.name}"
    path.write_bytes(b"")
    os.truncate(path, 2**28)
    memory = CudaHostMemory(torch.device("cuda", torch.cuda.current_device()))
    arenas = Arenas(USUAL, memory if is_registered else None)
    try:
        slot = ExportSlot(arena=path, offset=4096, status_offset=0, num_tokens=num_tokens)
        target = SlotTarget(arenas, slot, range(8))
        reader, failures = CudaBlockReader(on_device), list[Failure | None]()
        reader.copy(blocks, target, failures.append)
        reader.flush()
        assert failures == [None]
        out = target.open().clone()
        flat = target.open().view(-1).view(torch.uint8)
        assert (target.registered_parts(flat) is not None) == is_registered
        for layer in on_device:
            layer.zero_()
        writer = CudaBlockLoader(on_device, ROTARY_OF_USUAL)
        writer.warm_up()
        writer.write(target.open(), 0, blocks, is_registered=is_registered)
        writer.flush()
        del flat
    finally:
        path.unlink()
        arenas.close()
    tokens = values[:, blocks].flatten(1, 2)  # [L, T, H, 2 * D]
    want = torch.unflatten(tokens, 3, (2, 128)).permute(0, 3, 2, 1, 4)
    assert torch.equal(out, want)
    after = torch.stack([layer.transpose(1, 2) for layer in on_device]).cpu()
    assert torch.equal(after, values)


@cuda_only
def test_driver_registers_shared_memory() -> None:
    from engine.kv_transfer.worker.cuda_host_memory import (
        CudaHostMemory,
        direct_read_failure,
        registration_failure,
    )

    memory = CudaHostMemory(torch.device("cuda", torch.cuda.current_device()))
    assert registration_failure(memory) is None
    assert direct_read_failure(memory) is None


@cuda_only
@pytest.mark.parametrize("shift", [0, 1, -40, 700])
def test_written_span_is_shifted_and_may_be_overwritten_at_once(shift: int) -> None:
    from engine.kv_transfer.worker.cuda_block_loader import CudaBlockLoader

    on_device, blocks = caches(), [3, 11, 0]
    before = [cache.cpu().clone() for cache in on_device]
    generator = torch.Generator().manual_seed(1)
    shape = (LAYERS, 2, 2 * HEADS, 2 * BLOCK + 9, SIZE)
    arena = torch.randn(shape, generator=generator).bfloat16()
    span = arena[:, :, :HEADS]  # a rank's heads, not contiguous
    want = span.double().clone()
    want[:, 0] = slow_shift(span[:, 0].contiguous(), shift, ROTARY)
    CudaBlockLoader(on_device, ROTARY).write(span, shift, blocks, is_registered=False)
    arena.fill_(torch.nan)
    got = torch.empty_like(want, dtype=torch.bfloat16)
    after = [cache.cpu() for cache in on_device]
    slow_gather(after, blocks, got)
    torch.testing.assert_close(got.double(), want, atol=3e-2, rtol=2e-2)
    others = [i for i in range(NUM_BLOCKS) if i not in blocks]
    assert all(torch.equal(a[others], b[others]) for a, b in zip(after, before, strict=True))


def _open_and_sum(description: dict[str, Any], answers: Any) -> None:
    """Reads of a worker's GPU memory by the process of a trainer."""
    memory = gpu_kv.open_ipc(KvGpuMemory.model_validate(description))
    answers.put((memory.device.type, memory.numel(), int(memory.sum().item())))


@cuda_only
def test_gpu_memory_is_opened_by_another_process() -> None:
    from engine.kv_transfer.worker.gpu_arena import GpuArena

    arena = GpuArena(2**21 + 512, torch.device("cuda", 0), range(8))
    arena.part(0, 2**21 + 512).zero_()
    arena.part(2**20, 100).fill_(3)
    torch.cuda.synchronize()
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    reader = spawn.Process(target=_open_and_sum, args=(arena.info().to_dict(), answers))
    reader.start()
    try:
        assert answers.get(timeout=120) == ("cuda", 2**21 + 512, 300)
    finally:
        reader.join(timeout=60)
    assert reader.exitcode == 0


@cuda_only
def test_export_that_stays_on_the_gpu_equals_its_copy(tmp_path: Path) -> None:
    from engine.kv_transfer.worker.cuda_block_exporter import CudaBlockReader
    from engine.kv_transfer.worker.cuda_host_memory import CudaHostMemory
    from engine.kv_transfer.worker.gpu_arena import GpuArena

    form = replace(USUAL, layers=("a", "b"), num_kv_heads=HEADS, head_dim=SIZE)
    num_tokens, on_device = 2 * BLOCK + 9, caches()
    num_bytes = form.num_bytes(num_tokens)
    arena = GpuArena(4 * num_bytes, on_device[0].device, range(HEADS))
    path = Path("/dev/shm") / f"coppice-kv-test-{tmp_path.name}"
    path.write_bytes(bytes(2**20))
    arenas, failures = Arenas(form, CudaHostMemory(on_device[0].device)), list[Failure | None]()
    try:
        slot = ExportSlot(
            arena=path, offset=4096, status_offset=0, num_tokens=num_tokens, gpu_offset=num_bytes
        )
        target = SlotTarget(arenas, slot, range(HEADS))
        reader = CudaBlockReader(on_device, arena)
        reader.copy([3, 11, 0], target, failures.append)
        reader.flush()
        copied = target.open().clone()
    finally:
        path.unlink()
        arenas.close()
    want = torch.empty(LAYERS, 2, HEADS, num_tokens, SIZE, dtype=torch.bfloat16)
    slow_gather([cache.cpu() for cache in on_device], [3, 11, 0], want)
    kept = arena.part(num_bytes, num_bytes).cpu().view(torch.bfloat16).view(want.shape)
    assert failures == [None] and torch.equal(copied, want) and torch.equal(kept, want)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "v1", "qwen3", num_kv_heads=2)


@pytest.fixture
def exporting(model: Path) -> Iterator[LiveEngine]:
    # Not for the whole module: vLLM has one KV connector per process.
    with engine(model, **(EXPORTING | {"max_model_len": 512})) as live:
        for answer in live.rpc("coppice_prepare_kv_export"):
            assert isinstance(answer, dict), answer
        yield live


def arena_of(folder: Path) -> TestArena:
    return TestArena(folder / "arena", kv_format(2, dtype=DTYPE))


def flushed(live: LiveEngine) -> None:
    assert live.rpc("coppice_flush_exports") == [True]


def test_exports_equal_hugging_face(exporting: LiveEngine, model: Path, tmp_path: Path) -> None:
    """Prompts are prefilled in chunks, and sampled in captured graphs."""
    arena, truth = arena_of(tmp_path), reference(model)
    slots = [arena.slot(len(prompt) - 1) for prompt in PROMPTS]
    names = [
        exporting.submit(prompt, export=slot, max_tokens=20)
        for prompt, slot in zip(PROMPTS, slots, strict=True)
    ]
    exporting.finish(*names)
    flushed(exporting)
    for prompt, slot in zip(PROMPTS, slots, strict=True):
        assert arena.words(slot) == COMMITTED
        assert max_error(arena, slot, reference_kv(truth, prompt, len(prompt) - 1)) < KV_TOLERANCE
    arena.check()


def test_burst_of_exports_is_committed_completely(exporting: LiveEngine, tmp_path: Path) -> None:
    arena = arena_of(tmp_path)
    slots = [arena.slot(100) for _ in range(24)]
    names = [
        exporting.submit([i, *range(100)], export=slot, max_tokens=1)
        for i, slot in enumerate(slots)
    ]
    exporting.finish(*names)
    flushed(exporting)
    assert [arena.words(slot) for slot in slots] == [COMMITTED] * len(slots)
    arena.check()
    exporting.finish(exporting.submit([1, 2, 3], max_tokens=2))  # its steps report the ends
    assert exporting.core.coppice_check_pool()["num_references"] == 0


def test_loaded_span_gives_the_tokens_of_a_prefilled_one(tmp_path: Path) -> None:
    """In a model of one layer, KV does not depend on earlier tokens, so that loads are exact."""
    model = save_model(tmp_path / "one", "qwen3", num_kv_heads=2, num_hidden_layers=1)
    own, span = [(11 * i) % 500 for i in range(50)], [(13 * i) % 450 for i in range(70)]
    parts = [
        PromptSpan(token_ids=own),
        PromptSpan(token_ids=span, cache_key="a"),
        PromptSpan(token_ids=[1, 2, 3]),
    ]
    form = replace(kv_format(2, dtype=DTYPE), num_layers=1)
    with engine(model, **(EXPORTING | {"max_model_len": 512})) as live:
        live.rpc("coppice_prepare_kv_export")
        chains = Chains(live, TestArena(tmp_path / "arena", form))
        slot = chains.exports[tuple(span)] = chains.slot(len(span))
        live.finish(live.submit(span, export=slot, max_tokens=1))
        flushed(live)
        assert chains.arena.words(slot) == COMMITTED
        [answer] = chains.sample(parts, recompute_tokens=0)
    truth: Any = reference(model)
    expected = teacher_forced(truth, [*own, *span, 1, 2, 3], answer.token_ids)
    assert answer.logprobs == pytest.approx(expected, abs=LOGPROB_TOLERANCE)
    assert answer.num_cached_tokens >= BLOCK
