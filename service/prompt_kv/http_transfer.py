"""The answer that carries a handle's bytes, or a part of them.

Under our own HTTP server the body is handed to a thread that sends it past the event loop; under
another one it goes through the loop, in pieces, as any answer does.
"""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.http.protocol import HANDOFF, HandOff
from service.prompt_kv.byte_range import wanted_part
from service.prompt_kv.handles import Handle
from service.prompt_kv.prompt_kv import PromptKv
from service.prompt_kv.rate_limit import PIECE_BYTES
from service.prompt_kv.reading import Reading
from service.prompt_kv.socket_sender import Sending

MEDIA_TYPE = "application/octet-stream"
Chosen = tuple[int, dict[str, str], memoryview]


class KvData(Response):
    """The handle is looked up when the answer begins, so that nothing comes between that and the
    pin. What it raises then is answered as a problem."""

    def __init__(
        self,
        prompt_kv: PromptKv,
        sending: Sending,
        look_up: Callable[[], Handle],
        *,
        range_header: str | None,
        if_range: str | None,
    ) -> None:
        super().__init__(media_type=MEDIA_TYPE)
        self._prompt_kv = prompt_kv
        self._sending = sending
        self._look_up = look_up
        self._range = range_header
        self._if_range = if_range

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handle = self._look_up()
        status, headers, data = self._chosen(handle)
        self.init_headers({**headers, "Content-Length": str(len(data))})
        start = {"type": "http.response.start", "status": status, "headers": self.raw_headers}
        if scope["method"] == "HEAD":
            await send(start)
            await send({"type": "http.response.body", "body": b""})
            return
        with (
            self._sending.admitted(handle.owner),
            self._prompt_kv.handles.reading(handle) as reading,
        ):
            await send(start)
            await self._send_body(scope, send, data, handle.owner, reading)

    def _chosen(self, handle: Handle) -> Chosen:
        file, etag = self._prompt_kv.file(handle), handle.slot.etag
        headers = {"Accept-Ranges": "bytes", "ETag": etag}
        part = wanted_part(self._range, self._if_range, etag, len(file))
        if part is None:
            return 200, headers, file
        headers["Content-Range"] = f"bytes {part.start}-{part.end - 1}/{part.num_bytes}"
        return 206, headers, file[part.start : part.end]

    async def _send_body(
        self, scope: Scope, send: Send, data: memoryview, owner: str, reading: Reading
    ) -> None:
        hand_off: HandOff | None = scope.get("extensions", {}).get(HANDOFF)
        if hand_off is not None:
            await hand_off(
                lambda connection: self._sending.send(
                    connection, data, owner=owner, reading=reading
                )
            )
        else:
            for start in range(0, len(data), PIECE_BYTES):
                with reading.turn() as is_leased:
                    if not is_leased:
                        return  # an answer that ends early breaks the connection
                    piece = bytes(data[start : start + PIECE_BYTES])
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
