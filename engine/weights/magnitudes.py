"""Largest absolute value of each tensor, computed while a checkpoint arrives or from its file.

Imports neither torch nor vLLM. Magnitudes are bits: those of floats sort like their bits.
"""

from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from coppice.safetensors_io import FLOAT_BYTES, LENGTH_BYTES, TensorEntry, head_bytes, parse_header

BITS_DTYPES: Final[dict[int, npt.DTypeLike]] = {2: np.uint16, 4: np.uint32}
SIGNED_DTYPES: Final[dict[int, npt.DTypeLike]] = {2: np.int16, 4: np.int32}
MAX_SCANNED_HEADER_BYTES: Final = 2**22
"""Larger headers are parsed once, with the complete file: the parser holds the GIL."""


Magnitudes = Mapping[str, int]
"""Bits of the largest magnitude of each tensor of one file, by the tensor's name."""
UNKNOWN: Final[Magnitudes] = MappingProxyType({})


def largest_magnitude(data: memoryview | bytearray, dtype: str) -> int:
    """Bits of the largest magnitude among floats; the data must not be empty.

    As unsigned integers, negative floats sort above positive ones, as signed ones below.
    """
    item_bytes = FLOAT_BYTES[dtype]
    bits = np.frombuffer(data, BITS_DTYPES[item_bytes])
    positive = int(bits.view(SIGNED_DTYPES[item_bytes]).max())
    negative = int(bits.max()) - (1 << (8 * item_bytes - 1))
    return max(positive, negative)


class MagnitudeScan:
    """Magnitudes of the tensors of one safetensors file, whose blocks are passed in order.

    A scan of an invalid or unusual file finds nothing. The check of the complete file is the one
    that refuses it.
    """

    def __init__(self) -> None:
        self._head = bytearray()
        self._tensors: deque[TensorEntry] | None = None
        self._position = 0
        self._split = bytearray()  # an element that continues in the next block
        self._largest = 0
        self._found: dict[str, int] = {}

    @property
    def magnitudes(self) -> Magnitudes:
        """Magnitudes of the tensors that have arrived completely."""
        return self._found

    def update(self, block: bytes | bytearray) -> None:
        start, self._position = self._position, self._position + len(block)
        if self._tensors is None:
            self._head += block
            self._tensors = _tensors(self._head)
            if self._tensors is None:
                return
            start, block = 0, self._head
            self._head = bytearray()
        data = memoryview(block)
        while self._tensors and self._tensors[0].start < self._position:
            current = self._tensors[0]
            self._scan(data[max(0, current.start - start) : current.end - start], current.dtype)
            if current.end > self._position:
                return
            self._found[current.name], self._largest = self._largest, 0
            self._tensors.popleft()

    def _scan(self, part: memoryview, dtype: str) -> None:
        item_bytes = FLOAT_BYTES[dtype]
        if self._split:
            num_missing = item_bytes - len(self._split)
            self._split += part[:num_missing]
            part = part[num_missing:]
        if len(self._split) == item_bytes:
            self._largest = max(self._largest, largest_magnitude(self._split, dtype))
            self._split = bytearray()
        num_whole = len(part) - len(part) % item_bytes
        if num_whole:
            self._largest = max(self._largest, largest_magnitude(part[:num_whole], dtype))
        self._split += part[num_whole:]


def _tensors(head: bytearray) -> deque[TensorEntry] | None:
    """Tensors of a file in order, from its first bytes; None before the header's end.

    None of them if the file is not valid, or the header too large.
    """
    if len(head) < LENGTH_BYTES:
        return None
    end = head_bytes(head)
    if end > MAX_SCANNED_HEADER_BYTES:
        return deque()
    if len(head) < end:
        return None
    try:
        found = parse_header(head).tensors.values()
    except ValueError:
        return deque()
    return deque(found if all(tensor.dtype in FLOAT_BYTES for tensor in found) else ())
