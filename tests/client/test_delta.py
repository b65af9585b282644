"""Deltas of weights files: exact for any bits, and refused if malformed."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import save, save_file

from coppice.safetensors_io import read_header
from coppice.weights.delta import (
    BLOCK_BYTES,
    DeltaRefused,
    DifferenceError,
    Lineage,
    apply_delta,
    decode_block,
    encode_block,
    lineage_of,
)
from coppice.weights.delta_writer import NotComparable, write_delta

State = dict[str, NDArray[Any]]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def drained(steps: Any) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value


def saved(path: Path, state: State) -> Path:
    save_file(state, path)
    return path


def delta_of(folder: Path, old: State, new: State) -> Path:
    base, fresh = saved(folder / "old", old), saved(folder / "new", new)
    target = folder / "delta"
    num_bytes = drained(write_delta(base, fresh, Lineage(sha256(base), sha256(fresh)), target))
    assert num_bytes == target.stat().st_size
    return target


def applied(folder: Path, delta: Path) -> bytes:
    with (folder / "result").open("wb") as target:
        digest = apply_delta(folder / "old", delta, target)
    result = (folder / "result").read_bytes()
    assert digest == hashlib.sha256(result).hexdigest()
    return result


def stepped(values: NDArray[np.float32], size: float) -> NDArray[np.float32]:
    """Values after a step of Adam."""
    moved = np.random.default_rng(1).uniform(-size, size, values.shape)
    return (values + moved).astype(np.float32)


def as_bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def weights(num: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(0, 0.05, num).astype(np.float32)


@pytest.mark.parametrize("item_bytes", [2, 4])
@given(data=st.data())
def test_any_bits_are_restored_from_any_base(item_bytes: int, data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 50))
    old, new = (data.draw(st.binary(min_size=n, max_size=n)) for n in [num * item_bytes] * 2)
    packed = encode_block(old, new, item_bytes)
    assert decode_block(old, packed, item_bytes).tobytes() == new


def test_small_step_is_a_small_difference() -> None:
    before = weights(2**20)
    old, new = as_bfloat16_bits(before), as_bfloat16_bits(stepped(before, 1e-6))
    assert 0.001 < np.mean(old != new) < 0.05
    packed = encode_block(old.tobytes(), new.tobytes(), 2)
    assert len(packed) < 0.05 * old.nbytes


def test_encoded_block_is_at_most_as_long_as_its_base() -> None:
    packed = encode_block(bytes(2**22), bytes(2**22), 2)
    for wrong in (bytes(2**22 - 2), bytes(2**22 + 2)):
        with pytest.raises(DifferenceError, match="length"):
            decode_block(wrong, packed, 2)


@pytest.mark.parametrize(
    "cut", [lambda p: p[:-1], lambda p: p + b"x", lambda p: b"", lambda p: b"?"]
)
def test_damaged_block_is_refused(cut: Any) -> None:
    packed = encode_block(b"abcd", b"abce", 2)
    with pytest.raises(DifferenceError):
        decode_block(b"abcd", cut(packed), 2)


def test_delta_restores_the_exact_file(tmp_path: Path) -> None:
    old: State = {
        "same": weights(100),
        "moved": weights(2**22).reshape(2**12, 2**10),
        "half": weights(500).astype(np.float16),
        "noise": weights(400),
        "count": np.arange(7, dtype=np.int64),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(2.0, np.float32),
    }
    new = {
        **old,
        "moved": stepped(old["moved"], 1e-6),
        "half": (old["half"] + np.float16(1e-4)).astype(np.float16),
        "noise": np.random.default_rng(5).normal(0, 1e30, 400).astype(np.float32),
        "count": np.arange(7, dtype=np.int64)[::-1].copy(),
    }
    assert old["moved"].nbytes > 2 * BLOCK_BYTES
    delta = delta_of(tmp_path, old, new)
    assert applied(tmp_path, delta) == (tmp_path / "new").read_bytes()
    held = {name: tensor.dtype for name, tensor in read_header(delta).tensors.items()}
    assert held == {"moved": "U8", "half": "U8", "noise": "F32", "count": "I64"}
    assert lineage_of(delta) == (sha256(tmp_path / "old"), sha256(tmp_path / "new"))


def test_delta_without_changes_has_no_tensor(tmp_path: Path) -> None:
    state: State = {"w": weights(10)}
    delta = delta_of(tmp_path, state, state)
    assert not read_header(delta).tensors
    assert applied(tmp_path, delta) == (tmp_path / "old").read_bytes()


@pytest.mark.parametrize(
    "new", [{"v": weights(4)}, {"w": weights(5)}, {"w": weights(4), "v": weights(4)}]
)
def test_files_with_different_tensors_have_no_delta(tmp_path: Path, new: State) -> None:
    with pytest.raises(NotComparable):
        delta_of(tmp_path, {"w": weights(4)}, new)


def crafted(path: Path, state: State, **metadata: str) -> Path:
    path.write_bytes(save(state, {"format": "coppice-delta", **metadata}))
    return path


BAD: dict[str, State] = {
    "no tensor": {"other": weights(4)},
    "another dtype": {"w": weights(5)},
    "another dtype or": {"w": weights(4).astype(np.float64)},
    "truncated": {"w": np.frombuffer(b"\x09\0\0\0abc", np.uint8)},
    "excess bytes": {"w": np.zeros(9, np.uint8)},
    "is truncated": {"w": np.zeros(3, np.uint8)},
    "corrupt": {"w": np.frombuffer(b"\x03\0\0\0abc", np.uint8)},
}


@pytest.mark.parametrize("why", BAD)
def test_delta_that_does_not_match_the_base_is_refused_by_name(tmp_path: Path, why: str) -> None:
    saved(tmp_path / "old", {"w": weights(4)})
    with pytest.raises(DeltaRefused, match=why):
        applied(tmp_path, crafted(tmp_path / "delta", BAD[why]))


def test_invalid_delta_is_refused(tmp_path: Path) -> None:
    (tmp_path / "torn").write_bytes(b"torn")
    plain = saved(tmp_path / "plain", {"w": weights(4)})
    for path in (tmp_path / "torn", plain, crafted(tmp_path / "nameless", {})):
        with pytest.raises(DeltaRefused):
            lineage_of(path)
    with pytest.raises(DeltaRefused, match="SHA-256"):
        lineage_of(crafted(tmp_path / "x", {}, base_sha256="0" * 64, sha256="0" * 63))


def test_blocks_have_the_size_of_the_format() -> None:
    assert BLOCK_BYTES == 4 * 2**20
