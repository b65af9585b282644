import hashlib
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from coppice.transport.messages import CHUNK_BYTES
from coppice.weights.tensor_serialization import StateDict, Tensor, tensors_of, write_safetensors

T = TypeVar("T")


def finish(steps: Generator[None, None, T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


def write(path: Path, state: StateDict) -> bytes:
    return finish(write_safetensors(path, tensors_of(state)))


NUMPY_DTYPES = ["float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"]


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_array_round_trips(tmp_path: Path, dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    write(tmp_path / "w", {"w": array})
    read = load_file(tmp_path / "w")["w"]
    assert read.dtype == array.dtype
    assert np.array_equal(read, array)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4).T,
        np.arange(12.0)[::3],
        np.array(5.0),
        np.zeros((0, 3)),
        np.broadcast_to(np.float32(2.0), (2, 2)),
    ],
    ids=["transposed", "strided", "scalar", "empty", "broadcast"],
)
def test_any_shape_and_layout_round_trips(tmp_path: Path, array: Any) -> None:
    write(tmp_path / "w", {"w": array})
    read = load_file(tmp_path / "w")["w"]
    assert read.shape == array.shape
    assert np.array_equal(read, array)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float32", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "bool"]
)
def test_torch_tensor_round_trips(tmp_path: Path, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    load = pytest.importorskip("safetensors.torch").load_file
    tensor = torch.arange(6.0).reshape(2, 3).to(getattr(torch, dtype))
    state = {
        "w": torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()),
        "w_t": tensor.T,
        "part": tensor[:, 1],
        "scalar": tensor[0, 1],
        "none": tensor[:0],
    }
    write(tmp_path / "w", state)
    read = load(tmp_path / "w")
    assert read.keys() == state.keys()
    for name, value in state.items():
        assert read[name].dtype == value.dtype
        assert torch.equal(read[name].double(), value.double())


def test_digest_is_that_of_the_file(tmp_path: Path) -> None:
    digest = write(tmp_path / "w", {"w": np.ones(3)})
    assert digest == hashlib.sha256((tmp_path / "w").read_bytes()).digest()


def test_large_tensor_is_written_in_chunks(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 255, 2 * CHUNK_BYTES + 5, dtype=np.uint8)
    steps = list(write_safetensors(tmp_path / "w", tensors_of({"w": array})))
    assert len(steps) == 1 + 3
    assert np.array_equal(load_file(tmp_path / "w")["w"], array)


def test_every_tensor_is_aligned_to_its_elements(tmp_path: Path) -> None:
    write(tmp_path / "w", {"a": np.ones(3, dtype=np.uint8), "b": np.ones(2, dtype=np.float64)})
    raw = (tmp_path / "w").read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    assert header % 8 == 0
    assert raw[header:] == np.ones(2).tobytes() + b"\1\1\1"


def test_only_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    loaded: list[str] = []
    arrays = {name: np.ones(2, dtype=np.float32) for name in "abc"}
    steps = write_safetensors(tmp_path / "w", _noting(tensors_of(arrays), loaded))
    seen = [list(loaded) for _ in steps]
    assert seen == [[], ["a"], ["a", "b"], ["a", "b", "c"]]


def _noting(tensors: list[Tensor], loaded: list[str]) -> list[Tensor]:
    def noted(tensor: Tensor) -> Tensor:
        def load() -> NDArray[np.uint8]:
            loaded.append(tensor.name)
            return tensor.load()

        return replace(tensor, load=load)

    return [noted(tensor) for tensor in tensors]
