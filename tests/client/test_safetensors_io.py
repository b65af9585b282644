"""Headers of safetensors files: what is written is read back, and no other file is accepted."""

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import save

from coppice.safetensors_io import (
    MAX_HEADER_BYTES,
    TensorEntry,
    header_of,
    load_arrays,
    parse_header,
)
from tests.sample_sizes import num_examples

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SIZES = {"F64": 8, "BF16": 2, "F8_E4M3": 1, "BOOL": 1}
ONE = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}


@st.composite
def tensors(draw: st.DrawFn) -> list[TensorEntry]:
    names = draw(st.lists(NAMES.filter(lambda name: name != "__metadata__"), unique=True))
    found = []
    end = 0
    for name in names:
        dtype, shape = draw(st.sampled_from(sorted(SIZES))), draw(st.lists(st.integers(0, 4)))
        start, end = end, end + SIZES[dtype] * int(np.prod(shape))
        found.append(TensorEntry(name=name, dtype=dtype, shape=tuple(shape), start=start, end=end))
    return found


def read_by_library(content: bytes) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtypes and shapes in a file. Raises SafetensorError if it is invalid."""
    found = deserialize(content)  # type: ignore[no-untyped-call]
    return {name: (fields["dtype"], tuple(fields["shape"])) for name, fields in found}


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@given(tensors=tensors(), metadata=st.dictionaries(NAMES, NAMES), room=st.integers(0, 999))
def test_header_is_read_as_it_was_written(
    tensors: list[TensorEntry], metadata: Mapping[str, str], room: int
) -> None:
    head = header_of(tensors, metadata, min_bytes=room)
    assert len(head) >= room and len(head) % 8 == 0
    num_bytes = len(head) + sum(tensor.num_bytes for tensor in tensors)
    read = parse_header(head, num_bytes)
    assert (read.head, read.metadata) == (head, metadata)
    base = len(head)
    assert read.tensors == {
        each.name: TensorEntry(
            name=each.name,
            dtype=each.dtype,
            shape=each.shape,
            start=base + each.start,
            end=base + each.end,
        )
        for each in tensors
    }
    described = {each.name: (each.dtype, each.shape) for each in tensors}
    assert read_by_library(head + bytes(num_bytes - base)) == described


@settings(max_examples=num_examples(2000), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_corrupt_file_is_refused_or_valid_for_the_library(seed: int) -> None:
    draw = random.Random(seed)
    data = bytearray(
        save({"a": np.ones(3, np.float16), "b": np.ones((2, 0), np.int8)}, metadata={"k": "v"})
    )
    head = 8 + int.from_bytes(data[:8], "little")
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(head if draw.random() < 0.9 else len(data))
        data[at : at + draw.randint(0, 3)] = draw.choice(
            [draw.randbytes(draw.randint(0, 3)), b'"', b"{", b"[", b"9", b"-1", b"1e9", b"\\ud800"]
        )
    try:
        read = parse_header(bytes(data), len(data))
    except ValueError:
        return
    described = {each.name: (each.dtype, each.shape) for each in read.tensors.values()}
    assert read_by_library(bytes(data)) == described


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "ends within"),
        (b"\0" * 8, "Expecting value"),
        (file_of(b"{}")[:9], "ends within"),
        ((MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "larger than"),
        (file_of([]), "not a JSON object"),
        (file_of(b'{"a": ' * 100_000), "too deeply"),
        (file_of(b"\xff"), "decode"),
        (file_of({"\ud800": ONE}, b"x"), "surrogates"),
        (file_of({"__metadata__": {"a": 1}}), "metadata"),
        (file_of({"__metadata__": None}), "metadata"),
        (file_of(b'{"a": %b, "a": %b}' % ((json.dumps(ONE).encode(),) * 2), b"x"), "one name"),
        (file_of({"a": {**ONE, "more": 1}}, b"x"), "must have a dtype"),
        (file_of({"a": None}), "must have a dtype"),
        (file_of({"a": {**ONE, "dtype": "U9"}}, b"x"), "unknown dtype"),
        (file_of({"a": {**ONE, "dtype": []}}, b"x"), "unknown dtype"),
        (file_of({"a": {**ONE, "shape": [True]}}, b"x"), "no sizes"),
        (file_of({"a": {**ONE, "shape": [1.0]}}, b"x"), "no sizes"),
        (file_of({"a": {**ONE, "shape": [-1, -1]}}, b"x"), "no sizes"),
        (file_of({"a": {**ONE, "data_offsets": [0, 1, 1]}}, b"x"), "no sizes"),
        (file_of({"a": {**ONE, "shape": [2**40, 2**40, 0]}}, b"x"), "too large"),
        (file_of({"a": {**ONE, "data_offsets": [1, 0]}}, b"x"), "another size"),
        (file_of({"a": {**ONE, "dtype": "F4"}}, b"x"), "another size"),
        (file_of({"a": {**ONE, "data_offsets": [1, 2]}}, b"xx"), "does not follow"),
        (file_of({"a": ONE, "b": ONE}, b"x"), "does not follow"),
        (file_of({"a": ONE}, b"xx"), "bytes"),
        (file_of({"a": ONE}), "bytes"),
    ],
)
def test_invalid_file_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_header(content, len(content))


def test_elements_smaller_than_a_byte_are_counted_in_bits() -> None:
    content = file_of({"a": {"dtype": "F4", "shape": [3, 2], "data_offsets": [0, 3]}}, bytes(3))
    assert parse_header(content, len(content)).tensors["a"].num_bytes == 3


def test_arrays_that_numpy_lacks_are_refused() -> None:
    entry: dict[str, Any] = {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}
    with pytest.raises(ValueError, match="numpy arrays"):
        load_arrays(file_of({"a": entry}, bytes(2)))
