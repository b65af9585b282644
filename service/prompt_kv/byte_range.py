"""Parsing of the Range header: the whole file or a single byte range (RFC 9110, 14.2)."""

import re
from dataclasses import dataclass

from service.http.errors import RangeNotSatisfiable

_SINGLE_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Half-open byte range [start, end) of a file of `num_bytes`."""

    start: int
    end: int
    num_bytes: int


class OutOfRange(RangeNotSatisfiable):
    """416 response with the file's length in Content-Range."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.headers = {"Content-Range": f"bytes */{num_bytes}"}


def requested_range(
    header: str | None, if_range: str | None, etag: str, num_bytes: int
) -> ByteRange | None:
    """Byte range that the headers request; None for the whole file.

    The whole file is sent if there is no valid single range, or if `if_range` differs from `etag`.
    """
    found = None if header is None else _SINGLE_RANGE.fullmatch(header.strip())
    if found is None or found.group(0) == "bytes=-" or if_range not in (None, etag):
        return None
    first, last = found.groups()
    if not first:
        start, end = max(0, num_bytes - int(last)), num_bytes
    else:
        start, end = int(first), min(num_bytes, int(last) + 1 if last else num_bytes)
        if last and int(last) < start:
            return None  # an invalid range is ignored (RFC 9110, 14.2)
    if start >= end:
        raise OutOfRange(num_bytes)
    return ByteRange(start=start, end=end, num_bytes=num_bytes)
