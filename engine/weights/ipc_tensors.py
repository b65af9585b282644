"""CUDA IPC handles of a trainer's weights: data types and validation.

Imports neither torch nor vLLM. The trainer sends fields, not a pickle: unpickling runs code that
its sender chose. A rank opens the memory with these fields only.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from coppice.safetensors_io import FLOAT_BYTES
from engine.errors import CheckpointRefused
from engine.weights.checkpoint import (
    Checkpoint,
    StoredTensor,
    check_same_tensors,
    printable,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcHandle:
    """Arguments with which a process on the same host opens a tensor by CUDA IPC.

    The tensor begins at `offset` of the allocation of `handle`, in bytes. PyTorch decrements the
    counter at `ref_counter_offset` of the shared memory `ref_counter` when the tensor is closed.
    """

    handle: bytes
    offset: int
    ref_counter: str
    ref_counter_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IpcTensor:
    """Contiguous tensor of a trainer, with a copy on each GPU in `handles`, by the GPU's UUID.

    `dtype` is as in safetensors files.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    handles: Mapping[str, IpcHandle]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * FLOAT_BYTES[self.dtype]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        return cls(
            name=values["name"],
            dtype=values["dtype"],
            shape=tuple(values["shape"]),
            handles={gpu: IpcHandle(**handle) for gpu, handle in values["handles"].items()},
        )


IpcTensors = Sequence[IpcTensor]


@dataclass(slots=True, kw_only=True)
class WeightTransfer:
    """Tensors that a trainer hands over.

    `is_withdrawn`: the trainer does not wait for the load any more, so it may change them.
    """

    tensors: Sequence[IpcTensor]
    is_withdrawn: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors)


def check_tensors(served: Checkpoint, tensors: Sequence[IpcTensor]) -> None:
    """Check that the engine can load the tensors; raises CheckpointRefused with the reason."""
    index: dict[str, StoredTensor] = {}
    for tensor in tensors:
        if tensor.name in index:
            raise CheckpointRefused(f"{printable(tensor.name)} is listed twice")
        index[tensor.name] = _as_stored(tensor)
    check_same_tensors(served, Checkpoint(tensors=index))
    for tensor in tensors:
        _check_handles(tensor, tensors[0])


def _as_stored(tensor: IpcTensor) -> StoredTensor:
    return StoredTensor(
        name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, file=Path(), start=0, end=0
    )


def _check_handles(tensor: IpcTensor, first: IpcTensor) -> None:
    if tensor.handles.keys() != first.handles.keys():
        raise CheckpointRefused(
            f"{printable(tensor.name)} is not on the same GPUs as {printable(first.name)}"
        )
    for handle in tensor.handles.values():
        if handle.offset % FLOAT_BYTES[tensor.dtype]:
            raise CheckpointRefused(
                f"{printable(tensor.name)} is not aligned: its offset is {handle.offset}"
            )
