"""Largest magnitudes of tensors, from a checkpoint's blocks while they arrive or from its file.

Imports neither torch nor vLLM. Magnitudes are bits: those of floats sort like their bits.
"""

import json
from collections import deque
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.weights.checkpoint import DTYPE_BYTES, LENGTH_BYTES

BITS_DTYPES: Final[dict[int, npt.DTypeLike]] = {2: np.uint16, 4: np.uint32}
SIGNED_DTYPES: Final[dict[int, npt.DTypeLike]] = {2: np.int16, 4: np.int32}
MAX_SCANNED_HEADER_BYTES: Final = 2**22
"""Larger headers are parsed once, with the complete file: the parser holds the GIL."""


class Range(NamedTuple):
    """Bytes `start` to `end` (end excluded) of a file, and their dtype in safetensors' notation."""

    start: int
    end: int
    dtype: str


Magnitudes = Mapping[Range, int]
"""Bits of the largest magnitude of each tensor of one file."""
UNKNOWN: Final[Magnitudes] = MappingProxyType({})


def largest_magnitude(data: memoryview | bytearray, dtype: str) -> int:
    """Bits of the largest magnitude among floats; the data must not be empty.

    As unsigned integers, negative floats sort above positive ones, as signed ones below.
    """
    item_bytes = DTYPE_BYTES[dtype]
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
        self._ranges: deque[Range] | None = None
        self._position = 0
        self._split = bytearray()  # an element that continues in the next block
        self._largest = 0
        self._found: dict[Range, int] = {}

    @property
    def magnitudes(self) -> Magnitudes:
        """Magnitudes of the tensors that have arrived completely."""
        return self._found

    def update(self, block: bytes | bytearray) -> None:
        start, self._position = self._position, self._position + len(block)
        if self._ranges is None:
            self._head += block
            self._ranges = _ranges(self._head)
            if self._ranges is None:
                return
            start, block = 0, self._head
            self._head = bytearray()
        data = memoryview(block)
        while self._ranges and self._ranges[0].start < self._position:
            current = self._ranges[0]
            self._scan(data[max(0, current.start - start) : current.end - start], current.dtype)
            if current.end > self._position:
                return
            self._found[current], self._largest = self._largest, 0
            self._ranges.popleft()

    def _scan(self, part: memoryview, dtype: str) -> None:
        item_bytes = DTYPE_BYTES[dtype]
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


def _ranges(head: bytearray) -> deque[Range] | None:
    """Ranges of a file's tensors in order, from its first bytes; None before the header's end.

    None of them if the file is not valid, or the header too large.
    """
    if len(head) < LENGTH_BYTES:
        return None
    end = LENGTH_BYTES + int.from_bytes(head[:LENGTH_BYTES], "little")
    if end > MAX_SCANNED_HEADER_BYTES:
        return deque()
    if len(head) < end:
        return None
    try:
        header: dict[str, Any] = json.loads(head[LENGTH_BYTES:end])
        header.pop("__metadata__", None)
        ranges = sorted(_range(entry, end) for entry in header.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return deque()
    return deque(ranges) if _are_disjoint(ranges) else deque()


def _range(entry: dict[str, Any], base: int) -> Range:
    start, end = entry["data_offsets"]
    if not (type(start) is int and type(end) is int):
        raise TypeError("offsets must be integers")
    if not (0 <= start <= end and (end - start) % DTYPE_BYTES[entry["dtype"]] == 0):
        raise ValueError("not a range of whole elements")
    return Range(base + start, base + end, entry["dtype"])


def _are_disjoint(ranges: list[Range]) -> bool:
    """True if no byte would be scanned twice, which could take very long."""
    following = ranges[1:]
    return all(one.end <= other.start for one, other in zip(ranges, following, strict=False))
