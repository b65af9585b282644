"""Magnitudes of tensors: found in blocks as they arrive, compared with the slow reference."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save

from coppice.safetensors_io import FLOAT_BYTES
from engine.errors import CheckpointRefused
from engine.weights.checkpoint import read_base_checkpoint, read_checkpoint
from engine.weights.magnitudes import (
    BITS_DTYPES,
    MAX_SCANNED_HEADER_BYTES,
    Magnitudes,
    MagnitudeScan,
    largest_magnitude,
)
from engine.weights.validation import check_checkpoint
from tests.engine.random_models import Tensors

NORM = "model.norm.weight"


def reference(bits: NDArray[Any]) -> int:
    """Largest magnitude: the bits of each value without its sign."""
    sign = 1 << (8 * bits.itemsize - 1)
    return max(int(each) & (sign - 1) for each in bits)


def tensors(seed: int) -> Tensors:
    draw = np.random.default_rng(seed)
    return {
        "odd": draw.normal(size=5).astype(np.float16),
        "one": draw.normal(size=(7, 3)).astype(np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "negative": -np.abs(draw.normal(size=9)).astype(np.float16),
    }


def scanned(content: bytes, cuts: list[int]) -> Magnitudes:
    scan = MagnitudeScan()
    for start, end in zip([0, *cuts], [*cuts, len(content)], strict=True):
        scan.update(content[start:end])
    return scan.magnitudes


def file_of(entries: dict[str, Any], data: bytes) -> bytes:
    header = json.dumps(entries).encode()
    return len(header).to_bytes(8, "little") + header + data


def entry(start: object, end: object, dtype: object = "F32", num_elements: int = 2) -> object:
    return {"dtype": dtype, "shape": [num_elements], "data_offsets": [start, end]}


@pytest.mark.parametrize("dtype", FLOAT_BYTES)
@given(values=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_largest_magnitude_equals_the_reference(dtype: str, values: list[int]) -> None:
    bits = np.array(values, np.uint32).astype(BITS_DTYPES[FLOAT_BYTES[dtype]])
    assert largest_magnitude(memoryview(bits.tobytes()), dtype) == reference(bits)


@settings(deadline=None)
@given(seed=st.integers(0, 5), cuts=st.lists(st.integers(0, 450), max_size=12))
def test_scan_of_any_blocks_equals_the_reference(
    tmp_path_factory: pytest.TempPathFactory, seed: int, cuts: list[int]
) -> None:
    content = save(tensors(seed))
    path = tmp_path_factory.mktemp("scan") / "model.safetensors"
    path.write_bytes(content)
    found = scanned(content, sorted(min(cut, len(content)) for cut in cuts))
    stored = read_checkpoint(path).tensors
    assert found.keys() >= {name for name, tensor in stored.items() if tensor.num_bytes}
    for name, largest in found.items():
        tensor = stored[name]
        dtype = BITS_DTYPES[FLOAT_BYTES[tensor.dtype]]
        bits = np.frombuffer(content[tensor.start : tensor.end], dtype)
        assert largest == (reference(bits) if len(bits) else 0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 40,
        file_of({"a": entry(0, 8)}, b"")[:-3],
        (2).to_bytes(8, "little") + b"[]" + bytes(8),
        (2).to_bytes(8, "little") + b"}{" + bytes(8),
        file_of({"a": None}, bytes(8)),
        file_of({"a": entry(0, 6)}, bytes(6)),
        file_of({"a": entry("0", 8)}, bytes(8)),
        file_of({"a": entry(0.0, 8.0)}, bytes(8)),
        file_of({"a": entry(0, 1e300)}, bytes(8)),
        file_of({"a": entry(0, float("inf"))}, bytes(8)),
        file_of({"a": entry(False, 8)}, bytes(8)),
        file_of({"a": entry(0, 8, "I64", 1)}, bytes(8)),
        file_of({"a": entry(0, 8, [])}, bytes(8)),
        file_of({"a": entry(-4, 4)}, bytes(8)),
        file_of({name: entry(0, 8) for name in "ab"}, bytes(8)),
    ],
)
def test_invalid_file_has_no_magnitudes(content: bytes) -> None:
    assert scanned(content, list(range(len(content)))) == {}


def test_large_header_is_left_to_the_check_of_the_file() -> None:
    entries = {"a": entry(0, 8)}
    assert len(scanned(file_of(entries, bytes(8)), [])) == 1
    padded = {**entries, "__metadata__": {"pad": " " * MAX_SCANNED_HEADER_BYTES}}
    assert scanned(file_of(padded, bytes(8)), []) == {}


@pytest.mark.parametrize("position", [0, 2**17, 2**18 + 2])
def test_check_with_known_magnitudes_refuses_what_the_file_check_refuses(
    tmp_path: Path, position: int
) -> None:
    values = np.zeros(2**18 + 3, np.float32)
    served = tmp_path / "served.safetensors"
    served.write_bytes(save({NORM: values}))
    values[position] = np.nan
    candidate = tmp_path / "candidate.safetensors"
    candidate.write_bytes(save({NORM: values}))
    known = scanned(candidate.read_bytes(), [2**17, 2**19 + 1])
    assert len(known) == 1
    for magnitudes in ({}, known):
        with pytest.raises(CheckpointRefused, match="NaN"):
            check_checkpoint(read_base_checkpoint(served), candidate, magnitudes=magnitudes)


def test_values_with_known_magnitudes_are_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(save({NORM: np.ones(5, np.float32)}))
    known = scanned(path.read_bytes(), [])
    damaged = path.read_bytes()[:-4] + np.float32(np.nan).tobytes()
    path.write_bytes(damaged)
    served = read_base_checkpoint(path)
    check_checkpoint(served, path, magnitudes=known)
    with pytest.raises(CheckpointRefused):
        check_checkpoint(served, path)
