"""Validation of a checkpoint: names and shapes, then every value.

Values must be finite in the served dtype. numpy checks chunks of the files, so memory is bounded
and other threads keep running. Each byte is read once, at more than a gigabyte per second.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from engine.errors import CheckpointRefused
from engine.weights.checkpoint import LM_HEAD, Checkpoint, check_same_tensors, read_checkpoint
from engine.weights.tensor_file import DTYPE_BYTES, StoredTensor, printable, read_chunks

# The smallest non-finite magnitude, as bits. Magnitudes of floats sort like their bits.
NON_FINITE_BITS: Final = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F80_0000}
# The same after conversion (to nearest, ties to even), where it is smaller: 65520 and up overflow
# in float16, the largest bfloat16 plus half a step overflows in bfloat16.
OVERFLOW_BITS: Final = {
    ("BF16", "float16"): 0x4780,
    ("F32", "float16"): 0x477F_F000,
    ("F32", "bfloat16"): 0x7F7F_8000,
}
BITS_DTYPES: Final[dict[int, npt.DTypeLike]] = {2: np.uint16, 4: np.uint32}


def check_checkpoint(served: Checkpoint, candidate: Path, *, dtype: str = "float32") -> Checkpoint:
    """Index a candidate that the engine can load.

    Raises CheckpointRefused with the reason otherwise.

    `served` is `read_base_checkpoint` of the files that the engine started from, `dtype` the
    engine's dtype. A head that only repeats a tied embedding is left out of the result.
    """
    index = _without_tied_head(served, read_checkpoint(candidate))
    check_same_tensors(served, index)
    for tensor in sorted(index.tensors.values(), key=lambda t: (t.file, t.start)):
        check_values(tensor, dtype)
    return index


def _without_tied_head(served: Checkpoint, candidate: Checkpoint) -> Checkpoint:
    """Drop a tied head, which a trainer's state dict may contain but the model ignores."""
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
    """Raise CheckpointRefused unless all values are finite in `dtype`."""
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
    """Largest magnitude, as bits. The shift drops the sign."""
    return int((bits << 1).max()) >> 1
