"""Checkpoint files to upload: found on disk, or made from a state dict as one file or shards.

A checkpoint to upload is found on disk or made from a state dict; one that a server sees, too, is
identified by its fingerprint.
"""

import hashlib
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

from coppice.safetensors_io import read_header
from coppice.transport.messages import CHUNK_BYTES, Chunk, file_chunks
from coppice.weights.tensor_serialization import (
    SafetensorsImage,
    StateDict,
    Tensor,
    tensors_from_files,
    tensors_of,
)

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Files of a checkpoint: one safetensors file, or an index followed by its shards."""

    files: tuple[Path, ...]
    sharded: bool


def checkpoint_files(source: Path) -> Checkpoint:
    """Lists the files of a checkpoint; raises an exception if one is missing or incomplete."""
    index = source / INDEX
    if index.is_file():
        shards = _shards(index)
        files, tensors = (index, *shards), shards
    else:
        tensors = files = (_single_file(source),)
    for path in tensors:
        _check(path)
    return Checkpoint(files=files, sharded=index in files)


def _single_file(source: Path) -> Path:
    if not source.is_dir():
        return source
    found = sorted(source.glob("*.safetensors"))
    if len(found) != 1:
        raise ValueError(
            f"{source} has {len(found)} .safetensors files and no {INDEX}:"
            " expected one file, or an index of all"
        )
    return found[0]


def _shards(index: Path) -> tuple[Path, ...]:
    content: Any = json.loads(index.read_bytes())
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    names = sorted(set(weight_map.values()))
    if strange := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{index} lists files outside of its directory: {strange}")
    return tuple(index.parent / name for name in names)


def _check(path: Path) -> None:
    """Raises FileNotFoundError or ValueError unless the file is a complete safetensors file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    try:
        read_header(path)
    except ValueError as error:
        raise ValueError(f"{path.name} is not a complete safetensors file: {error}") from error


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


@dataclass(frozen=True, slots=True, kw_only=True)
class FileImage:
    """Content of one file of a checkpoint; `chunks` can be called repeatedly."""

    name: str
    num_bytes: int
    chunks: Callable[[], Iterator[Chunk]]


def file_of(image: SafetensorsImage | Path) -> FileImage:
    """A checkpoint of one file; the content of a path is sent unchanged."""
    if isinstance(image, Path):
        num_bytes = image.stat().st_size
        return FileImage(name=image.name, num_bytes=num_bytes, chunks=partial(file_chunks, image))
    return FileImage(name=SINGLE_FILE, num_bytes=image.num_bytes, chunks=image.chunks)


def shards_of(tensors: Sequence[Tensor], num_shards: int) -> list[FileImage]:
    """At most `num_shards` files of about equal size with all tensors, and their index."""
    groups = _balanced(tensors, num_shards)
    names = [f"model-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
    shards = [
        replace(file_of(SafetensorsImage(group)), name=name)
        for name, group in zip(names, groups, strict=True)
    ]
    return [*shards, _index(names, groups)]


def _balanced(tensors: Iterable[Tensor], num_groups: int) -> list[list[Tensor]]:
    """Non-empty groups: each tensor, the largest first, is added to the smallest group."""
    groups: list[list[Tensor]] = [[] for _ in range(num_groups)]
    sizes = [0] * num_groups
    for tensor in sorted(tensors, key=lambda tensor: -tensor.num_bytes):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(tensor)
        sizes[smallest] += max(tensor.num_bytes, 1)
    return [group for group in groups if group]


def _index(names: Sequence[str], groups: Sequence[Sequence[Tensor]]) -> FileImage:
    tensors = [
        (tensor, name) for name, group in zip(names, groups, strict=True) for tensor in group
    ]
    content = json.dumps(
        {
            "metadata": {"total_size": sum(tensor.num_bytes for tensor, _ in tensors)},
            "weight_map": {tensor.name: name for tensor, name in tensors},
        }
    ).encode()
    return FileImage(name=INDEX, num_bytes=len(content), chunks=lambda: iter((content,)))


def fingerprint(path: Path) -> str:
    """Digest of the names, sizes and modification times of a file, or of a directory's weights.

    Raises OSError if a file is removed meanwhile.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    found = [(file.name, file.stat()) for file in files]
    lines = [f"{name} {status.st_size} {status.st_mtime_ns}\n" for name, status in found]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def sha256_of(path: Path) -> Generator[None, None, bytes]:
    """Computes the SHA-256 of a file, one chunk per generator step."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            yield
    return digest.digest()
