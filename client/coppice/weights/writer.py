"""A safetensors file, written with one tensor in memory at a time.

The library's own serializer wants all of them at once. The format: eight bytes with the length of
the header, a JSON header, the tensors' bytes without a gap.
"""

import hashlib
import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path

from coppice.transport.driver import CHUNK_BYTES
from coppice.weights.tensor import Tensor

FROM_TORCH: Mapping[str, str] = {"format": "pt"}

_ALIGNMENT = 8


def write_safetensors(
    path: Path, tensors: Iterable[Tensor], metadata: Mapping[str, str] = FROM_TORCH
) -> Generator[None, None, bytes]:
    """In steps of one chunk; returns the file's SHA-256."""
    # The widest first, as the library does: readers map the file and need aligned elements.
    ordered = sorted(tensors, key=lambda tensor: -tensor.item_bytes)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in _chunks(ordered, metadata):
            digest.update(chunk)
            file.write(chunk)
            yield
    return digest.digest()


def _chunks(tensors: list[Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    yield _header(tensors, metadata)
    for tensor in tensors:
        data = tensor.load().data
        for start in range(0, tensor.num_bytes, CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]


def _header(tensors: list[Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": tensor.code,
            "shape": tensor.shape,
            "data_offsets": (offset, end),
        }
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
