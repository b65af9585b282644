"""Writer of safetensors files with one tensor in memory at a time.

The library's own serializer needs all tensors at once. File format: eight bytes with the length of
the header, a JSON header, then the tensors' bytes without gaps.
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
    """Writes in steps of one chunk; returns the SHA-256 of the file."""
    # Widest dtype first, as in the library: readers map the file and need aligned elements.
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
