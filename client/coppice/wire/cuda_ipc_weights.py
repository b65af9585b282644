"""Request to activate weights from a trainer's GPU memory: tensors as CUDA IPC handles.

Every field has a type of its own. PyTorch's own form of a handle is a pickle, which runs code of
its sender's choice when it is read.
"""

from typing import Annotated, Final, Literal

from pydantic import Field

from coppice.wire.base import JsonInteger, RequestModel
from coppice.wire.weights import ActivateRequest, Sequence

CUDA_MALLOC: Final = b"c"
"""Type of PyTorch's handle of memory that cudaMalloc has allocated, in its second byte.

That of an expandable segment names a process and file descriptors, which a reader would copy.
"""
NUM_COUNTERS: Final = 10_000
"""Number of reference counters in one of PyTorch's files."""

TransferDtype = Literal["BF16", "F16", "F32"]
HandleText = Annotated[str, Field(pattern=r"^[0-9A-Za-z+/][2GWm][M-P][0-9A-Za-z+/]{85}$")]
"""66 bytes in base64, the second of which is CUDA_MALLOC."""
GpuUuid = Annotated[str, Field(pattern=r"^[0-9A-Za-z-]{1,64}$")]
Size = Annotated[int, Field(ge=0, lt=2**48), JsonInteger()]
CounterOffset = Annotated[int, Field(ge=0, lt=NUM_COUNTERS), JsonInteger()]


class IpcHandle(RequestModel):
    """Location of a tensor in the GPU memory of another process on the host.

    It begins at byte `offset` of the allocation of `handle`, a CUDA IPC handle in base64. The
    server decrements the counter at `ref_counter_offset` of PyTorch's shared memory `ref_counter`
    when it has closed the tensor.
    """

    handle: HandleText
    offset: Size
    ref_counter: Annotated[str, Field(pattern=r"^/torch_[0-9]{1,20}_[0-9]{1,20}_[0-9]{1,20}$")]
    ref_counter_offset: CounterOffset


class IpcTensor(RequestModel):
    """Contiguous tensor, with a copy on each GPU that has a rank of the engine, by its UUID.

    `dtype` is as in safetensors files.
    """

    name: Annotated[str, Field(min_length=1, max_length=512)]
    dtype: TransferDtype
    shape: Annotated[list[Size], Field(max_length=8)]
    handles: Annotated[dict[GpuUuid, IpcHandle], Field(min_length=1, max_length=64)]


class TransferRequest(ActivateRequest):
    """Body of a request to activate weights that are in GPU memory of the caller.

    The tensors must not change until the answer.
    """

    tensors: Annotated[list[IpcTensor], Field(min_length=1)]
    sequence: Sequence | None = None
