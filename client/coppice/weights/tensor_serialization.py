"""Streaming of state dicts or checkpoints as one safetensors file in chunks, with checksums.

torch is never imported: a caller with torch tensors has already imported it. numpy lacks bfloat16
and the 8-bit floats, so torch tensors are read as bytes.

No copy of the whole file exists, while the library's own serializer needs all tensors at once:
chunks are views of the tensors' own memory where that is contiguous. The SHA-256 of a file is
computed in a thread, so it overlaps with writing.
"""

import hashlib
import math
import sys
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from coppice.safetensors_io import (
    CODES,
    ByteSpan,
    TensorEntry,
    header_of,
    read_exactly,
    read_header,
)
from coppice.transport.messages import CHUNK_BYTES, Chunk

StateDict = Mapping[str, Any]
"""Maps names to numpy arrays or torch tensors."""
FROM_TORCH: Mapping[str, str] = {"format": "pt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor to write to a safetensors file; `load` returns its bytes in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    item_bytes: int
    num_bytes: int
    memory: Hashable
    load: Callable[[], NDArray[np.uint8]]


def tensors_of(state: StateDict) -> list[Tensor]:
    """Tensors of a state dict, in order; of several names for the same memory only the first.

    Views of different parts of one storage are different tensors and are all kept.
    """
    if not state:
        raise ValueError("the state dict is empty")
    seen: set[Hashable] = set()
    tensors = []
    for tensor in (_tensor_of(name, value) for name, value in state.items()):
        if tensor.num_bytes == 0 or tensor.memory not in seen:
            tensors.append(tensor)
            seen.add(tensor.memory)
    return tensors


def tensors_from_files(paths: Iterable[Path]) -> list[Tensor]:
    """Tensors of all safetensors files of a checkpoint, in the order of the files."""
    files = [(path, read_header(path)) for path in paths]
    return [_of_file(path, entry) for path, file in files for entry in file.tensors.values()]


def _of_file(path: Path, entry: TensorEntry) -> Tensor:
    def load() -> NDArray[np.uint8]:
        with FileIO(path) as file:
            data = read_exactly(file, ByteSpan(entry.start, entry.end))
        return np.frombuffer(data, np.uint8)

    return Tensor(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        item_bytes=entry.num_bytes // max(1, math.prod(entry.shape)),
        num_bytes=entry.num_bytes,
        memory=(path, entry.start),
        load=load,
    )


def _tensor_of(name: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray):
        return _of_numpy(name, value)
    if hasattr(value, "full_tensor"):
        raise ValueError(
            f"{name} is sharded over processes: gather it first, for example with full_tensor()"
        )
    if hasattr(value, "untyped_storage"):
        return _of_torch(name, value)
    raise TypeError(f"{name} is {type(value).__name__}, neither a numpy array nor a torch tensor")


def _of_numpy(name: str, array: NDArray[Any]) -> Tensor:
    if not array.dtype.isnative:
        raise ValueError(f"{name} does not have native byte order")
    return Tensor(
        name=name,
        dtype=_code(name, array.dtype.name),
        shape=array.shape,
        item_bytes=array.itemsize,
        num_bytes=array.nbytes,
        memory=(array.ctypes.data, array.dtype.name, array.shape, array.strides),
        load=lambda: np.ascontiguousarray(array).reshape(-1).view(np.uint8),
    )


def _of_torch(name: str, tensor: Any) -> Tensor:
    dtype = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    return Tensor(
        name=name,
        dtype=_code(name, dtype),
        shape=shape,
        item_bytes=tensor.element_size(),
        num_bytes=tensor.numel() * tensor.element_size(),
        memory=(str(tensor.device), tensor.data_ptr(), dtype, shape, tensor.stride()),
        load=lambda: _torch_bytes(tensor),
    )


def _torch_bytes(tensor: Any) -> NDArray[np.uint8]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: NDArray[np.uint8] = flat.view(sys.modules["torch"].uint8).numpy()
    return array


def _code(name: str, dtype: str) -> str:
    if dtype not in CODES:
        raise ValueError(f"{name} has dtype {dtype}, which safetensors files do not support")
    return CODES[dtype]


class HashedChunks:
    """Chunks that are hashed in a thread as they pass; `digest` is that of the last whole pass."""

    def __init__(self) -> None:
        self.digest = b""

    def of(self, chunks: Iterable[Chunk]) -> Generator[Chunk, None, None]:
        """Yields the chunks; each is hashed while its consumer handles it."""
        sha256, hashing = hashlib.sha256(), Future[None]()
        hashing.set_result(None)
        with ThreadPoolExecutor(1, thread_name_prefix="sha256") as thread:
            for chunk in chunks:
                hashing.result()
                hashing = thread.submit(sha256.update, chunk)
                yield chunk
            hashing.result()
        self.digest = sha256.digest()


class ChecksummedChunks:
    """Chunks whose XXH3 checksum is computed as they pass; `checksum` is that of the last pass."""

    def __init__(self) -> None:
        self.checksum = ""

    def of(self, chunks: Iterable[Chunk]) -> Generator[Chunk, None, None]:
        xxh3 = xxhash.xxh3_128()
        for chunk in chunks:
            xxh3.update(chunk)
            yield chunk
        self.checksum = xxh3.hexdigest()


class SafetensorsImage:
    """Content of a safetensors file with these tensors; `chunks` can be called repeatedly.

    One tensor at a time is loaded. The tensors must not change before the last chunk.
    """

    def __init__(self, tensors: Iterable[Tensor], metadata: Mapping[str, str] = FROM_TORCH) -> None:
        # Widest dtype first, as in the library: readers map the file and need aligned elements.
        self._tensors = sorted(tensors, key=lambda tensor: -tensor.item_bytes)
        self._header = header_of(self._tensors, metadata)
        self.num_bytes = len(self._header) + sum(tensor.num_bytes for tensor in self._tensors)

    def chunks(self) -> Iterator[Chunk]:
        yield self._header
        for tensor in self._tensors:
            data = tensor.load().data
            for start in range(0, tensor.num_bytes, CHUNK_BYTES):
                yield data[start : start + CHUNK_BYTES]


def write_safetensors(
    path: Path, tensors: Iterable[Tensor], metadata: Mapping[str, str] = FROM_TORCH
) -> Generator[None, None, bytes]:
    """Writes a safetensors file, one chunk per generator step; returns the file's SHA-256."""
    hashed = HashedChunks()
    with path.open("wb") as file:
        for chunk in hashed.of(SafetensorsImage(tensors, metadata).chunks()):
            file.write(chunk)
            yield
    return hashed.digest
