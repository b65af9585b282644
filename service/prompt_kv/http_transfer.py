"""HTTP response with exported prompt KV, or with a byte range of its file (RFC 9110, 14.2).

Under Coppice's own uvicorn protocol the body is sent by a thread that bypasses the event loop.
Under any other ASGI server it is sent in pieces as ordinary ASGI body messages.
"""

import re
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.http.errors import RangeNotSatisfiable
from service.http.uvicorn_protocol import SEND_BODY_EXTENSION, SendBodyExtension
from service.prompt_kv.handle import DownloadPin, Handle
from service.prompt_kv.manager import PromptKvManager
from service.prompt_kv.socket_sender import SocketSender

_SINGLE_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")
MEDIA_TYPE = "application/octet-stream"
BODY_PIECE_BYTES = 2**20
"""Number of bytes that the event loop copies at a time, under another ASGI server."""
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


class KvDataResponse(Response):
    """HTTP response with prompt KV that looks up the handle only when the response is sent.

    There is no await between the lookup and the pin of the slot. Exceptions of the lookup become
    problem documents.
    """

    def __init__(
        self,
        prompt_kv: PromptKvManager,
        socket_sender: SocketSender,
        handle_id: str,
        owner: str,
        *,
        range_header: str | None,
        if_range: str | None,
    ) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        self._prompt_kv = prompt_kv
        self._socket_sender = socket_sender
        self._handle_id = handle_id
        self._owner = owner
        self._range = range_header
        self._if_range = if_range

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self._prompt_kv.get(self._handle_id, self._owner)
        status, headers, data = self._select_range(handle)
        self.init_headers({**headers, "Content-Length": str(len(data))})
        start = {"type": "http.response.start", "status": status, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b""})
            return
        with (
            self._socket_sender.admitted(self._owner),
            self._prompt_kv.handles.pinned(handle) as pin,
        ):
            await send(start)
            await self._send_body(scope, send, data, pin)

    def _select_range(self, handle: Handle) -> RangeSelection:
        file, etag = self._prompt_kv.file(handle), handle.slot.etag
        headers = {"Accept-Ranges": "bytes", "ETag": etag}
        byte_range = requested_range(self._range, self._if_range, etag, len(file))
        if byte_range is None:
            return 200, headers, file
        headers["Content-Range"] = (
            f"bytes {byte_range.start}-{byte_range.end - 1}/{byte_range.num_bytes}"
        )
        return 206, headers, file[byte_range.start : byte_range.end]

    async def _send_body(
        self, scope: Scope, send: Send, data: memoryview, pin: DownloadPin
    ) -> None:
        hand_off: SendBodyExtension | None = scope.get("extensions", {}).get(SEND_BODY_EXTENSION)
        if hand_off is not None:
            await hand_off(
                lambda connection: self._socket_sender.send(
                    connection, data, owner=self._owner, pin=pin
                )
            )
        else:
            for start in range(0, len(data), BODY_PIECE_BYTES):
                with pin.turn() as is_leased:
                    if not is_leased:
                        return  # a body shorter than Content-Length: the server closes
                    piece = bytes(data[start : start + BODY_PIECE_BYTES])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
