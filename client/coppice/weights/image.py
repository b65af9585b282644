"""Bytes of a safetensors file, produced from tensors while they are sent or written.

No copy of the whole file exists: chunks are views of the tensors' own memory where that is
contiguous. The SHA-256 of a file is computed in a thread, so it overlaps with writing.
"""

import hashlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from os import PathLike
from pathlib import Path

import xxhash

from coppice.transport.messages import CHUNK_BYTES, Chunk
from coppice.weights.safetensors_index import checkpoint_files
from coppice.weights.safetensors_writer import (
    FROM_TORCH,
    StateDict,
    Tensor,
    safetensors_header,
    tensors_from_files,
    tensors_of,
)


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
        self._header = safetensors_header(self._tensors, metadata)
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


def one_file(source: StateDict | str | PathLike[str]) -> SafetensorsImage | Path | None:
    """Weights as one file: an image of a state dict, or a path; None for a sharded checkpoint."""
    if isinstance(source, Mapping):
        return SafetensorsImage(tensors_of(source))
    checkpoint = checkpoint_files(Path(source))
    return None if checkpoint.sharded else checkpoint.files[0]


def tensors_of_source(source: StateDict | str | PathLike[str]) -> list[Tensor]:
    """Tensors of a state dict, or of all files of a checkpoint."""
    if isinstance(source, Mapping):
        return tensors_of(source)
    checkpoint = checkpoint_files(Path(source))
    return tensors_from_files(checkpoint.files[1:] if checkpoint.sharded else checkpoint.files)
