"""Tensors of numpy or torch state dicts, and the header of a safetensors file that has them.

torch is never imported: a caller with torch tensors has already imported it. numpy lacks bfloat16
and the 8-bit floats, so torch tensors are read as bytes.

The bytes of one tensor are loaded at a time; the library's own serializer needs all of them at
once. File format: eight bytes with the length of the header, a JSON header, then the tensors' bytes
without gaps.
"""

import hashlib
import json
import math
import sys
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coppice.transport.messages import CHUNK_BYTES
from coppice.weights.safetensors_index import (
    ByteSpan,
    TensorEntry,
    read_exactly,
    read_safetensors_index,
)

StateDict = Mapping[str, Any]
"""Maps names to numpy arrays or torch tensors."""
_CODES = {
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
FROM_TORCH: Mapping[str, str] = {"format": "pt"}
_ALIGNMENT = 8


def sha256_of(path: Path) -> Generator[None, None, bytes]:
    """Computes the SHA-256 of a file, one chunk per generator step."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            yield
    return digest.digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """One tensor to write to a safetensors file; `load` returns its bytes in C order."""

    name: str
    code: str
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
    files = [(path, read_safetensors_index(path)) for path in paths]
    return [_of_file(path, entry) for path, file in files for entry in file.tensors.values()]


def _of_file(path: Path, entry: TensorEntry) -> Tensor:
    def load() -> NDArray[np.uint8]:
        with FileIO(path) as file:
            data = read_exactly(file, ByteSpan(entry.start, entry.end))
        return np.frombuffer(data, np.uint8)

    return Tensor(
        name=entry.name,
        code=entry.code,
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
        code=_code(name, array.dtype.name),
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
        code=_code(name, dtype),
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
    if dtype not in _CODES:
        raise ValueError(f"{name} has dtype {dtype}, which safetensors files do not support")
    return _CODES[dtype]


def safetensors_header(tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> bytes:
    """Bytes of a safetensors file before its first tensor; the tensors follow in this order."""
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
