"""Selection of the files of a checkpoint to upload: tensors and their index only."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coppice.weights.safetensors_index import read_head

_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One file, or an index followed by its shards."""

    files: tuple[Path, ...]
    sharded: bool


def checkpoint_files(source: Path) -> Checkpoint:
    """Lists the files. Raises ValueError for an incomplete checkpoint, before any upload."""
    index = source / _INDEX
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
            f"{source} holds {len(found)} .safetensors files and no {_INDEX}:"
            " want one file, or an index of all"
        )
    return found[0]


def _shards(index: Path) -> tuple[Path, ...]:
    content: Any = json.loads(index.read_bytes())
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    names = sorted(set(weight_map.values()))
    if strange := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{index} names files outside of its directory: {strange}")
    return tuple(index.parent / name for name in names)


def _check(path: Path) -> None:
    """Validates the header and compares the lengths in it with the file's."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file")
    read_head(path)
