"""Packed requests: a safetensors file in place of JSON, for requests with many token ids.

    token_ids          int32    [tokens]      all lists of token ids, one after another
    token_ids.offsets  int64    [lists + 1]   list i owns offsets[i]:offsets[i + 1]
    logprobs           float64  [values]      the same for all lists of logprobs;
    logprobs.offsets   int64    [lists + 1]   both tensors are absent if there are none

The metadata's `request` is the request's JSON, in which the index of a list may stand in place of
the list. Each list is used once. A token id takes about 7 bytes as JSON and 4 bytes here.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, SerializationInfo, SerializerFunctionWrapHandler, ValidationInfo
from safetensors.numpy import save

from coppice.safetensors_io import load_arrays, parse_header

PACKED_MEDIA_TYPE = "application/vnd.coppice.safetensors"
TOKEN_IDS = "token_ids"
LOGPROBS = "logprobs"
_TYPES: Mapping[str, np.dtype[Any]] = {
    TOKEN_IDS: np.dtype(np.int32),
    LOGPROBS: np.dtype(np.float64),
}
_OFFSETS = ".offsets"


class PackedLists:
    """Lists of a packed request, as the context of its serialization and of its validation."""

    def __init__(self, lists: Mapping[str, list[Any]] | None = None) -> None:
        self._lists: dict[str, list[Any]] = {name: [] for name in _TYPES} | dict(lists or {})

    def put(self, name: str, values: list[Any]) -> int:
        self._lists[name].append(np.asarray(values, _TYPES[name]))
        return len(self._lists[name]) - 1

    def take(self, name: str, index: object) -> NDArray[Any]:
        """Remove and return a list. Raises ValueError if there is none."""
        found = self._lists[name]
        if type(index) is not int or not 0 <= index < len(found) or found[index] is None:
            raise ValueError(f"must be the index of a list of the tensor {name} that is used once")
        values, found[index] = found[index], None
        array: NDArray[Any] = values
        return array

    def check_taken(self) -> None:
        """Raise ValueError if a list was not taken."""
        for name, lists in self._lists.items():
            if any(values is not None for values in lists):
                raise ValueError(f"the request does not use all lists of the tensor {name}")

    def tensors(self) -> dict[str, NDArray[Any]]:
        tensors = dict[str, NDArray[Any]]()
        for name, lists in self._lists.items():
            if lists:
                tensors[name] = np.concatenate(lists)
                tensors[name + _OFFSETS] = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        return tensors


def given_list(name: str, value: Any, info: ValidationInfo) -> Any:
    """List that a field's value stands for in a packed request, as an array; else the value."""
    if isinstance(info.context, PackedLists) and not isinstance(value, list):
        return info.context.take(name, value)
    return value


def serialized_list(
    name: str, value: Any, handler: SerializerFunctionWrapHandler, info: SerializationInfo
) -> Any:
    """Value for a list in JSON: in a packed request its index, unless it is empty."""
    if isinstance(info.context, PackedLists) and value and isinstance(value, list):
        return info.context.put(name, value)
    return handler(value)


def pack_request(request: BaseModel) -> bytes:
    lists = PackedLists()
    document = request.model_dump_json(exclude_none=True, context=lists)
    data: bytes = save(lists.tensors(), metadata={"request": document})
    return data


def unpack_request(data: bytes) -> tuple[str, PackedLists]:
    """JSON of a packed request, and its lists. Raises ValueError if the file is invalid.

    The caller limits the size of the header.
    """
    header = parse_header(data, len(data))
    if "request" not in header.metadata:
        raise ValueError("its metadata has no `request`")
    known = {name + end for name in _TYPES for end in ("", _OFFSETS)}
    if unknown := header.tensors.keys() - known:
        raise ValueError(f"{len(unknown)} tensor(s) of the file are unknown")
    tensors = load_arrays(data)
    lists = PackedLists({name: _lists(name, tensors) for name in _TYPES})
    return header.metadata["request"], lists


def _lists(name: str, tensors: Mapping[str, NDArray[Any]]) -> list[Any]:
    """Lists of a tensor by its offsets. Raises ValueError if they do not fit."""
    values, offsets = tensors.get(name), tensors.get(name + _OFFSETS)
    if values is None and offsets is None:
        return []
    if values is None or offsets is None:
        raise ValueError(f"{name} and {name}{_OFFSETS} must be present together")
    if values.dtype != _TYPES[name] or values.ndim != 1:
        raise ValueError(f"{name} must be {_TYPES[name]} with one dimension")
    if offsets.dtype != np.int64 or offsets.ndim != 1 or not len(offsets):
        raise ValueError(f"{name}{_OFFSETS} must be int64 with one dimension, and not empty")
    is_increasing = bool((np.diff(offsets) >= 0).all())
    if offsets[0] != 0 or offsets[-1] != len(values) or not is_increasing:
        raise ValueError(f"{name}{_OFFSETS} must increase from 0 to the number of values")
    return np.split(values, offsets[1:-1]) if len(offsets) > 1 else []
