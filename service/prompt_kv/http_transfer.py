"""HTTP response with a handle's bytes, or a range of them.

Under Coppice's own uvicorn protocol the body is sent by a thread that bypasses the event loop.
Under any other ASGI server it is sent in pieces as ordinary ASGI body messages.
"""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.http.protocol import SEND_BODY_EXTENSION, SendBodyExtension
from service.prompt_kv.byte_range import requested_range
from service.prompt_kv.download_pin import DownloadPin
from service.prompt_kv.handles import Handle
from service.prompt_kv.prompt_kv import PromptKvManager
from service.prompt_kv.rate_limit import PIECE_BYTES
from service.prompt_kv.socket_sender import SocketSender

MEDIA_TYPE = "application/octet-stream"
RangeSelection = tuple[int, dict[str, str], memoryview]


class KvDataResponse(Response):
    """Response that looks up its handle when it is sent.

    There is no await between the lookup and the pin of the slot. Exceptions of the lookup become
    problem documents.
    """

    def __init__(
        self,
        prompt_kv: PromptKvManager,
        socket_sender: SocketSender,
        find_handle: Callable[[], Handle],
        *,
        range_header: str | None,
        if_range: str | None,
    ) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        self._prompt_kv = prompt_kv
        self._socket_sender = socket_sender
        self._find_handle = find_handle
        self._range = range_header
        self._if_range = if_range

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self._find_handle()
        status, headers, data = self._select_range(handle)
        self.init_headers({**headers, "Content-Length": str(len(data))})
        start = {"type": "http.response.start", "status": status, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b""})
            return
        with (
            self._socket_sender.admitted(handle.owner),
            self._prompt_kv.handles.reading(handle) as reading,
        ):
            await send(start)
            await self._send_body(scope, send, data, handle.owner, reading)

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
        self, scope: Scope, send: Send, data: memoryview, owner: str, reading: DownloadPin
    ) -> None:
        hand_off: SendBodyExtension | None = scope.get("extensions", {}).get(SEND_BODY_EXTENSION)
        if hand_off is not None:
            await hand_off(
                lambda connection: self._socket_sender.send(
                    connection, data, owner=owner, reading=reading
                )
            )
        else:
            for start in range(0, len(data), PIECE_BYTES):
                with reading.turn() as is_leased:
                    if not is_leased:
                        return  # a body shorter than Content-Length: the server closes
                    piece = bytes(data[start : start + PIECE_BYTES])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
