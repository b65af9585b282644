"""Weights as several files with an index, which can be uploaded at the same time."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from coppice.transport.messages import Chunk, file_chunks
from coppice.weights.image import SafetensorsImage
from coppice.weights.safetensors_index import INDEX
from coppice.weights.safetensors_writer import Tensor


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
    return FileImage(name="model.safetensors", num_bytes=image.num_bytes, chunks=image.chunks)


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
