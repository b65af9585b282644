"""HTTP response that streams exported prompt KV, whole or a byte range (RFC 9110, 14.2).

The event loop copies and sends the file in small pieces. A piece of the file itself in the write
buffer of a connection could be overwritten by other prompt KV before its reader takes it.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from service.errors import Overloaded, QuotaExceeded, RangeNotSatisfiable
from service.kv.handles.handle import Handle
from service.kv.handles.manager import PromptKvManager
from service.observability.kv_metrics import PromptKvMetrics

_SINGLE_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
MEDIA_TYPE = "application/octet-stream"
PIECE_BYTES = 2**18
"""Bytes that are copied at a time: the memory that a reader that stalls occupies."""
RETRY_SECONDS = 2.0
RangeSelection = tuple[int, dict[str, str], memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRange:
    """Half-open byte range [start, end) of a file of `num_bytes`."""

    start: int
    end: int
    num_bytes: int


class OutOfRange(RangeNotSatisfiable):
    """HTTP 416 response with the file's length in Content-Range."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.headers = {"Content-Range": f"bytes */{num_bytes}"}


def requested_range(
    header: str | None, if_range: str | None, etag: str, num_bytes: int
) -> ByteRange | None:
    """Byte range that the HTTP headers Range and If-Range request; None for the whole file.

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


class KvDownloads:
    """Open downloads of prompt KV: at most `max_open`, of which one API key may have half."""

    def __init__(self, max_open: int, metrics: PromptKvMetrics) -> None:
        self.sent_bytes = metrics.sent_bytes
        self._max_open = max_open
        self._open: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        return self._open.total()

    @contextmanager
    def admitted(self, owner: str) -> Iterator[None]:
        """Context manager that counts an open download; beyond the limits it raises an error."""
        share = max(1, self._max_open // 2)
        if self._open[owner] >= share:
            raise QuotaExceeded(
                f"an API key may have {share} prompt-KV downloads open; wait until one ends",
                retry_after_seconds=RETRY_SECONDS,
            )
        if self.num_open >= self._max_open:
            raise Overloaded(
                f"{self._max_open} prompt-KV downloads are open, which is the limit",
                retry_after_seconds=RETRY_SECONDS,
            )
        self._open[owner] += 1
        try:
            yield
        finally:
            self._open[owner] -= 1
            self._open += Counter()  # removes owners without downloads


class KvDataResponse(StreamingResponse):
    """HTTP response with prompt KV that looks up the handle only when the response is sent.

    There is no await between the lookup and the pin of the entry. Exceptions of the lookup become
    problem documents.
    """

    def __init__(
        self,
        prompt_kv: PromptKvManager,
        downloads: KvDownloads,
        handle_id: str,
        owner: str,
        *,
        range_header: str | None,
        if_range: str | None,
    ) -> None:
        super().__init__((), media_type=MEDIA_TYPE)
        self._prompt_kv = prompt_kv
        self._downloads = downloads
        self._handle_id = handle_id
        self._owner = owner
        self._range = range_header
        self._if_range = if_range

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self._prompt_kv.get(self._handle_id, self._owner)
        self.status_code, headers, self._data = self._select_range(handle)
        self.init_headers({**headers, "Content-Length": str(len(self._data))})
        if scope["method"] == "HEAD":
            return await Response(None, self.status_code, self.headers)(scope, receive, send)
        with (
            self._downloads.admitted(self._owner),
            self._prompt_kv.handles.pinned(handle) as self._pin,
        ):
            await super().__call__(scope, receive, send)

    def _select_range(self, handle: Handle) -> RangeSelection:
        file, etag = self._prompt_kv.file(handle), handle.entry.etag
        headers = {"Accept-Ranges": "bytes", "ETag": etag}
        byte_range = requested_range(self._range, self._if_range, etag, len(file))
        if byte_range is None:
            return 200, headers, file
        headers["Content-Range"] = (
            f"bytes {byte_range.start}-{byte_range.end - 1}/{byte_range.num_bytes}"
        )
        return 206, headers, file[byte_range.start : byte_range.end]

    async def stream_response(self, send: Send) -> None:
        """Send the file. If its lease ends, the response ends early and the connection closes."""
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        for start in range(0, len(self._data), PIECE_BYTES):
            self._pin.sweep()
            if not self._pin.is_open:
                return
            piece = bytes(self._data[start : start + PIECE_BYTES])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            self._downloads.sent_bytes.inc(len(piece))
            await asyncio.sleep(0)  # other requests are answered, also if the reader is fast
        await send({"type": "http.response.body", "body": b""})
