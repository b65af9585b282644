"""Whether a checkpoint could be served: its names and shapes, then every value in it.

Values must be finite in the type that is served. numpy looks at chunks of the files, so memory is
bounded and other threads run on. This reads each byte once, at more than a gigabyte a second.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine.errors import CheckpointRefused
from engine.weights.checkpoint import LM_HEAD, Checkpoint, check_same_tensors, read_checkpoint
from engine.weights.tensor_file import DTYPE_BYTES, StoredTensor, printable, read_chunks

# The least magnitude that is not finite, as bits: magnitudes of floats are ordered as their bits.
NON_FINITE_BITS: Final = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000}
# The same once converted (to nearest, ties to even), where that is less: 65520 and up is infinite
# in float16, the largest bfloat16 and half a step more is in bfloat16.
OVERFLOW_BITS: Final = {
    ("BF16", "float16"): 0x4780,
    ("F32", "float16"): 0x477F_F000,
    ("F32", "bfloat16"): 0x7F7F_8000,
}
BITS_DTYPES: Final[dict[int, npt.DTypeLike]] = {2: np.uint16, 4: np.uint32}


def check_checkpoint(served: Checkpoint, candidate: Path, *, dtype: str = "float32") -> Checkpoint:
    """Index a candidate that the engine can load; CheckpointRefused says why it cannot.

    `served` is `read_served` of the files the engine started from, `dtype` the type it computes
    in. A head that only repeats a tied embedding is left out of the result.
    """
    index = _without_tied_head(served, read_checkpoint(candidate))
    check_same_tensors(served, index)
    for tensor in sorted(index.tensors.values(), key=lambda t: (t.file, t.start)):
        check_values(tensor, dtype)
    return index


def _without_tied_head(served: Checkpoint, candidate: Checkpoint) -> Checkpoint:
    """A trainer's state dict carries a tied head too. The model would ignore whatever it holds."""
    head, embedding = candidate.tensors.get(LM_HEAD), candidate.embedding
    if head is None or embedding is None or LM_HEAD in served.tensors:
        return candidate
    if not _have_equal_bytes(head, embedding):
        raise CheckpointRefused(
            f"{LM_HEAD} differs from {printable(embedding.name)}, but this model ties the two: "
            "its head is its embedding"
        )
    return candidate.without_tensor(LM_HEAD)


def _have_equal_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    pairs = zip(read_chunks(one), read_chunks(other), strict=True)
    return all(bytes(ours) == bytes(theirs) for ours, theirs in pairs)


def check_values(tensor: StoredTensor, dtype: str) -> None:
    """Unless all of them are finite once they are converted."""
    not_finite = NON_FINITE_BITS[tensor.dtype]
    limit = OVERFLOW_BITS.get((tensor.dtype, dtype), not_finite)
    bits = BITS_DTYPES[DTYPE_BYTES[tensor.dtype]]
    for chunk in read_chunks(tensor):
        largest = _largest_magnitude(np.frombuffer(chunk, dtype=bits))
        if largest >= not_finite:
            raise CheckpointRefused(f"{printable(tensor.name)} holds NaN or infinity")
        if largest >= limit:
            raise CheckpointRefused(f"{printable(tensor.name)} holds values too large for {dtype}")


def _largest_magnitude(bits: npt.NDArray[Any]) -> int:
    """As bits; the shift drops the sign."""
    return int((bits << 1).max()) >> 1
