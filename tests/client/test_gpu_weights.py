"""Weights that a trainer hands over in GPU memory, without a GPU."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from coppice import (
    ActivationFailed,
    ConnectionFailed,
    GpuWeights,
    Rollouts,
    TimedOut,
    VersionConflict,
    WeightsRefused,
)
from engine.errors import CheckpointRefused, LoadFailed
from tests.fake_engine import FakeEngine
from tests.serving_thread import serving_in_thread

pytestmark = pytest.mark.slow

IPC: dict[str, Any] = {"engine": {"weight_transfer": "ipc"}}
ALLOCATION = b"c"
SEGMENT = b"e"


@dataclass
class CudaTensor:
    """A tensor on the CPU that claims to be on a GPU."""

    value: torch.Tensor
    index: int = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.index)

    def detach(self) -> "CudaTensor":
        return self

    def contiguous(self) -> "CudaTensor":
        return CudaTensor(self.value.contiguous(), self.index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.value, name)


@dataclass
class FakeIpc:
    """PyTorch's functions of CUDA IPC. `events` lists their calls, `released` the counters."""

    events: list[str]
    kind: bytes = ALLOCATION
    released: list[tuple[bytes, int]] = field(default_factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reductions, "reduce_tensor", self.reduce)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: self.events.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: self.events.append("collect"))
        monkeypatch.setattr(
            torch.UntypedStorage,
            "_release_ipc_counter_cuda",
            lambda name, offset: self.released.append((name, offset)),
        )
        monkeypatch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(uuid=f"gpu-{device.index}"),
        )

    def reduce(self, tensor: CudaTensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Arguments of a storage that begins at byte 512 of an allocation."""
        self.events.append("export")
        assert tensor.value.is_contiguous()
        handle = b"\x02" + self.kind + bytes([tensor.index]) * 64
        num_bytes = tensor.value.untyped_storage().nbytes()
        layout = (torch.Tensor, tensor.value.shape, tensor.value.stride())
        return reductions.rebuild_cuda_tensor, (
            *(*layout, tensor.value.storage_offset(), torch.storage.TypedStorage),
            *(tensor.value.dtype, tensor.index, handle, num_bytes, 512, False),
            *(b"/torch_9_8_7", 4 + self.events.count("export"), b"event", True),
        )


@pytest.fixture
def ipc(monkeypatch: pytest.MonkeyPatch) -> FakeIpc:
    fake = FakeIpc([])
    fake.install(monkeypatch)
    return fake


def state(index: int = 0) -> dict[str, Any]:
    fused = torch.arange(12, dtype=torch.bfloat16)
    return {
        "q": CudaTensor(fused[:8].view(4, 2), index),
        "k": CudaTensor(fused[8:].view(2, 2), index),
        "transposed": CudaTensor(torch.ones(3, 2).T, index),
    }


def test_server_receives_the_location_of_each_tensor(tmp_path: Path, ipc: FakeIpc) -> None:
    engine = FakeEngine()
    with serving_in_thread(engine, tmp_path, **IPC) as url, Rollouts(url) as rollouts:
        answer = rollouts.transfer_weights("v1", state(), sequence=3)
        assert (answer.version, answer.sequence, answer.previous) == ("v1", 3, "v0")
        assert rollouts.weights().active == "v1"
    [tensors] = engine.transferred
    found = [(t.name, t.dtype, t.shape, t.handles["gpu-0"].offset) for t in tensors]
    assert found == [
        ("q", "BF16", (4, 2), 512),
        ("k", "BF16", (2, 2), 512 + 16),
        ("transposed", "F32", (2, 3), 512),
    ]
    handle = tensors[0].handles["gpu-0"]
    assert handle.handle == b"\x02c" + bytes(64)
    assert (handle.ref_counter, handle.ref_counter_offset) == ("/torch_9_8_7", 5)
    assert ipc.events == ["export"] * 3 + ["synchronize", "collect"]


def test_copies_of_other_ranks_are_added(tmp_path: Path, ipc: FakeIpc) -> None:
    engine = FakeEngine()
    of_rank_1 = pickle.loads(pickle.dumps(GpuWeights(state(1)).tensors))
    with GpuWeights(state()) as weights:
        weights.add(of_rank_1)
        with serving_in_thread(engine, tmp_path, **IPC) as url, Rollouts(url) as rollouts:
            rollouts.transfer_weights("v1", weights)
        assert ipc.events[-1] == "synchronize", "the weights are the caller's"
    assert ipc.events[-1] == "collect"
    [tensors] = engine.transferred
    for tensor in tensors:
        handles = {gpu: handle.handle[2:3] for gpu, handle in tensor.handles.items()}
        assert handles == {"gpu-0": b"\0", "gpu-1": b"\1"}


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ({"q": CudaTensor(torch.ones(4, 2))}, "tensors of other names"),
        (state() | {"k": CudaTensor(torch.ones(2, 2))}, "k has another dtype or shape"),
        (state() | {"k": CudaTensor(torch.ones(4).bfloat16())}, "k has another dtype or shape"),
    ],
)
def test_rank_with_other_tensors_is_refused(
    ipc: FakeIpc, other: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        GpuWeights(state()).add(GpuWeights(other).tensors)


def test_tensors_that_cannot_be_opened_are_refused(ipc: FakeIpc) -> None:
    with pytest.raises(ValueError, match="w is not on a GPU: use publish_weights"):
        GpuWeights({"w": torch.ones(2)})
    with pytest.raises(ValueError, match="w has dtype I64, and not BF16, F16 or F32"):
        GpuWeights({"w": CudaTensor(torch.arange(4))})
    ipc.kind = SEGMENT
    with pytest.raises(ValueError, match="q is in an expandable segment"):
        GpuWeights(state())


def test_failed_transfer_releases_the_tensors_and_is_not_repeated(
    tmp_path: Path, ipc: FakeIpc
) -> None:
    engine = FakeEngine()
    engine.load_error = LoadFailed("no handle for this GPU")
    with serving_in_thread(engine, tmp_path, **IPC) as url, Rollouts(url) as rollouts:
        with pytest.raises(ActivationFailed, match="no handle for this GPU"):
            rollouts.transfer_weights("v1", state())
        assert engine.calls.count("swap v1") == 1
        assert ipc.events[-1] == "collect"
        engine.load_error = None
        rollouts.transfer_weights("v1", state())
        with pytest.raises(VersionConflict):
            rollouts.transfer_weights("v1", state())


COUNTERS = [(b"/torch_9_8_7", offset) for offset in (5, 6, 7)]


def test_memory_of_refused_tensors_is_released(tmp_path: Path, ipc: FakeIpc) -> None:
    """Also if they are exported once and sent again."""
    engine = FakeEngine()
    engine.open_error = CheckpointRefused("q contains NaN or infinity")
    with serving_in_thread(engine, tmp_path, **IPC) as url, Rollouts(url) as rollouts:
        with GpuWeights(state()) as weights:
            for _ in range(2):
                with pytest.raises(WeightsRefused, match="q contains NaN"):
                    rollouts.transfer_weights("v1", weights)
            assert not ipc.released, "a repeated transfer opens them"
        assert ipc.released == COUNTERS
        assert ipc.events[-1] == "collect"


def test_memory_of_loaded_tensors_is_left_to_the_server(tmp_path: Path, ipc: FakeIpc) -> None:
    with serving_in_thread(FakeEngine(), tmp_path, **IPC) as url, Rollouts(url) as rollouts:
        rollouts.transfer_weights("v1", state())
    assert not ipc.released


def test_memory_of_tensors_that_a_server_may_have_open_is_not_released(
    tmp_path: Path, ipc: FakeIpc
) -> None:
    """Also if a repeated transfer is refused, because the first one goes on."""
    engine = FakeEngine()
    engine.transfer_delay_seconds = 1.0
    with (
        serving_in_thread(engine, tmp_path, **IPC) as url,
        Rollouts(url) as rollouts,
        GpuWeights(state()) as weights,
    ):
        with pytest.raises(TimedOut):
            rollouts.transfer_weights("v1", weights, timeout=0.1)
        with pytest.raises(VersionConflict):
            rollouts.transfer_weights("v1", weights)
    assert not ipc.released


def test_memory_of_tensors_that_were_not_sent_is_released(ipc: FakeIpc) -> None:
    with Rollouts("http://127.0.0.1:9") as rollouts, pytest.raises(ConnectionFailed):
        rollouts.transfer_weights("v1", state())
    assert ipc.released == COUNTERS


def test_memory_of_tensors_that_could_not_be_exported_is_released(ipc: FakeIpc) -> None:
    ipc.kind = SEGMENT
    with pytest.raises(ValueError, match="q is in an expandable segment"):
        GpuWeights(state())
    assert ipc.released == COUNTERS[:1]
    assert ipc.events[-1] == "collect"


def test_other_rank_releases_its_memory_after_a_refusal(ipc: FakeIpc) -> None:
    with GpuWeights(state(1)) as weights:
        weights.mark_refused()
    assert ipc.released == COUNTERS
