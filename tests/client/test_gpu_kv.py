"""Prompt KV that a trainer copies from the server's GPU memory, without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from coppice import GpuKvReader, GpuPromptKV, KvHandle, KvSource
from tests.client.test_kv import PROMPT, handle_from
from tests.fake_export import fake_kv
from tests.fake_gpu import FakeCuda, GpuEngine, gpu_name
from tests.serving_thread import serving_in_thread

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@contextmanager
def server(tmp_path: Path, engine: GpuEngine) -> Iterator[str]:
    with serving_in_thread(engine, tmp_path, kv={"capacity_bytes": 2**24}) as url:
        yield url


@pytest.fixture
def engine() -> GpuEngine:
    return GpuEngine(max_context_tokens=10_000)


@pytest.fixture
def cuda(engine: GpuEngine, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda(engine)
    fake.install(monkeypatch)
    return fake


def assert_right(kv: GpuPromptKV | None) -> None:
    assert kv is not None
    expected, tensors = torch.from_numpy(fake_kv(PROMPT[:-1], "v0")), kv.tensors()
    assert list(tensors) == ["k.0", "v.0", "k.1", "v.1"]
    for layer in range(2):
        assert torch.equal(tensors[f"k.{layer}"], expected[layer, 0])
        assert torch.equal(tensors[f"v.{layer}"], expected[layer, 1])


def test_kv_of_all_ranks_is_copied_from_memory_opened_once(
    tmp_path: Path, engine: GpuEngine, cuda: FakeCuda
) -> None:
    """A GPU has another index in the trainer than in the server."""
    with server(tmp_path, engine) as url:
        source = KvSource(url)
        reader = GpuKvReader(source)
        with_lease = [handle_from(url), handle_from(url)]
        for handle in with_lease:
            kv = reader.fetch(handle, device=CPU)
            assert_right(kv)
        assert kv is not None
        assert cuda.opened == [(1, b"\0"), (0, b"\1")]
        assert source.counts == {"cuda_ipc": 2}
        with kv:
            pass
        assert_right(kv)  # a copy, so that it stays valid
        assert reader.fetch(kv.handle, device=CPU) is None
        assert source.counts == {"cuda_ipc": 2, "cuda_ipc_failed": 1, "kv_gone": 1}


def refused(reader: GpuKvReader, handle: KvHandle, source: KvSource) -> dict[str, int]:
    before = dict(source.counts)
    assert reader.fetch(handle, device=CPU) is None
    return {name: n - before.get(name, 0) for name, n in source.counts.items()}


def test_what_cannot_be_read_is_counted_and_left_to_other_transports(
    tmp_path: Path, engine: GpuEngine, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server(tmp_path, engine) as url:
        source, handle = KvSource(url), handle_from(url)
        assert (
            refused(GpuKvReader(source), handle.model_copy(update={"locators": []}), source) == {}
        )
        cuda.visible = [gpu_name(0)]  # CUDA_VISIBLE_DEVICES of the trainer
        assert refused(GpuKvReader(source), handle, source) == {"cuda_ipc_failed": 1, "KvLost": 1}
        cuda.visible, cuda.error = [gpu_name(0), gpu_name(1)], RuntimeError("invalid context")
        assert refused(GpuKvReader(source), handle, source)["cuda_ipc_failed"] == 1
        cuda.error = None
        far = [at.model_copy(update={"offset": 2**40}) for at in handle.locators]
        outside = handle.model_copy(update={"locators": far})
        assert refused(GpuKvReader(source), outside, source)["BadAnswer"] == 1
        monkeypatch.setattr(source, "renew", lambda *_: 1e-6)
        assert refused(GpuKvReader(source), handle, source)["KvLost"] == 1


def test_server_that_was_restarted_has_other_memory(
    tmp_path: Path, engine: GpuEngine, cuda: FakeCuda
) -> None:
    with server(tmp_path / "a", engine) as url:
        reader = GpuKvReader(KvSource(url))
        assert_right(reader.fetch(handle_from(url), device=CPU))
    again = cuda.engine = GpuEngine(max_context_tokens=10_000)
    with server(tmp_path / "b", again) as url:
        reader._source = KvSource(url)
        assert_right(reader.fetch(handle_from(url), device=CPU))
    assert len(cuda.opened) == 4


def test_no_handle_is_no_kv() -> None:
    reader: Any = GpuKvReader(KvSource("http://127.0.0.1:1"))
    assert reader.fetch(None) is None
