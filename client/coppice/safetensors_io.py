"""Reading of safetensors files (headers, arrays, byte ranges), and writing of their headers.

A file has eight bytes with the length of its header, the header as JSON, and the tensors' bytes
without gaps. The library tells neither where a tensor is in a file nor what the header of a part of
a file says, and it maps files: one that is truncated meanwhile kills the process with SIGBUS. Files
are therefore read here, never mapped, and the checks are at least those of the library.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from safetensors import SafetensorError
from safetensors.numpy import load

LENGTH_BYTES: Final = 8
MAX_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors library
FLOAT_BYTES: Final = {"BF16": 2, "F16": 2, "F32": 4}
"""Item sizes of the dtypes that can be served, of weights and of KV."""
CODES: Final = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Dtypes in files by their names in numpy and torch."""
_BITS: Final = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
_METADATA: Final = "__metadata__"
_FIELDS: Final = {"dtype", "shape", "data_offsets"}
_MAX_SIZE: Final = 2**63
_ALIGNMENT: Final = 8


class SizedTensor(Protocol):
    """Tensor to write to a safetensors file, whose bytes need not be known yet."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def num_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of a safetensors file: bytes `start` to `end` (end excluded), row-major."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Parsed header of a safetensors file: `head` is everything before the first tensor.

    The tensors are in the order of the file and follow each other without gaps.
    """

    head: bytes
    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorEntry]


class ByteSpan(NamedTuple):
    """Byte range of a file, from start to end (exclusive)."""

    start: int
    end: int


def head_bytes(data: bytes | bytearray | memoryview) -> int:
    """Number of bytes before a file's first tensor, as its first 8 bytes claim."""
    return LENGTH_BYTES + int.from_bytes(data[:LENGTH_BYTES], "little")


def read_header(path: Path) -> Header:
    """Reads the header of a file. Raises ValueError unless the file is complete and valid."""
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(LENGTH_BYTES)
        head = prefix + file.read(min(head_bytes(prefix) - LENGTH_BYTES, MAX_HEADER_BYTES))
    return parse_header(head, num_bytes)


def parse_header(data: bytes | bytearray, num_bytes: int | None = None) -> Header:
    """Parses the header of a file that begins with `data`. Raises ValueError if it is invalid.

    `num_bytes`: size of the file, if it is known.
    """
    end = head_bytes(data)
    if end > LENGTH_BYTES + MAX_HEADER_BYTES:
        raise ValueError(f"its header is larger than {MAX_HEADER_BYTES} bytes")
    if len(data) < max(end, LENGTH_BYTES):
        raise ValueError("it ends within its header")
    head = bytes(data[:end])
    metadata, entries = _parse_json(head[LENGTH_BYTES:])
    found = sorted(
        (_entry_of(name, fields, end) for name, fields in entries.items()),
        key=lambda tensor: (tensor.start, tensor.end),
    )
    for tensor in found:
        if tensor.start != end:
            raise ValueError(f"{_shown(tensor.name)} does not follow the tensor before it")
        end = tensor.end
    if num_bytes not in (None, end):
        raise ValueError(f"it has {num_bytes} bytes, but by its header {end}")
    return Header(head=head, metadata=metadata, tensors={tensor.name: tensor for tensor in found})


def _parse_json(text: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    try:
        entries = json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(entries, dict):
        raise ValueError("its header is not a JSON object")
    metadata = entries.pop(_METADATA, {})
    if not (isinstance(metadata, dict) and all(type(text) is str for text in metadata.values())):
        raise ValueError("its metadata must be strings")
    "".join((*entries, *metadata, *metadata.values())).encode()  # refuses lone surrogates
    return metadata, entries


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header has two entries of one name")
    return found


def _entry_of(name: str, fields: object, base: int) -> TensorEntry:
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise ValueError(f"{_shown(name)} must have a dtype, a shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise ValueError(f"{_shown(name)} has an unknown dtype")
    if not (_are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"{_shown(name)} has a shape or data_offsets that are no sizes")
    num_bits = _BITS[dtype]
    for size in shape:
        num_bits *= size
        if num_bits > _MAX_SIZE:  # or else a long shape takes very long
            raise ValueError(f"{_shown(name)} is too large")
    start, end = offsets
    if num_bits != 8 * (end - start):
        raise ValueError(f"{_shown(name)} has {end - start} bytes, and another size by its shape")
    return TensorEntry(
        name=name, dtype=dtype, shape=tuple(shape), start=base + start, end=base + end
    )


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < _MAX_SIZE for value in values
    )


def _shown(name: str) -> str:
    return ascii(name[:120])


def header_of(
    tensors: Iterable[SizedTensor], metadata: Mapping[str, str], *, min_bytes: int = 0
) -> bytes:
    """Bytes of a file before its first tensor, at least `min_bytes`; the tensors follow in order.

    They are padded with spaces to a multiple of 8, so that elements are aligned.
    """
    entries: dict[str, object] = {_METADATA: dict(metadata)}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tuple(tensor.shape),
            "data_offsets": (offset, end),
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    num_bytes = max(min_bytes - LENGTH_BYTES, len(text))
    num_bytes += -num_bytes % _ALIGNMENT
    return num_bytes.to_bytes(LENGTH_BYTES, "little") + text.ljust(num_bytes)


def load_arrays(data: bytes) -> dict[str, Any]:
    """Tensors of a whole file as numpy arrays. Raises ValueError if it is invalid."""
    try:
        return dict(load(data))
    except (SafetensorError, KeyError, TypeError) as error:  # numpy lacks some dtypes
        raise ValueError(f"it is not a safetensors file of numpy arrays: {error}") from error


def read_exactly(file: FileIO, span: ByteSpan) -> bytes:
    """Reads a byte range of a file with pread, so threads may share the file.

    Raises ValueError if the file was truncated.
    """
    parts, at = [], span.start
    while at < span.end:
        part = os.pread(file.fileno(), span.end - at, at)
        if not part:
            raise ValueError("the file was truncated while it was read")
        parts.append(part)
        at += len(part)
    return b"".join(parts)
