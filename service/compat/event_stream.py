"""Response of server-sent events, with keep-alives."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from anyio import CancelScope
from fastapi.responses import StreamingResponse
from starlette.types import Message, Send

KEEP_ALIVE = b": samples are still being generated\n\n"
KEEP_ALIVE_SECONDS = 10.0


class EventStreamResponse(StreamingResponse):
    """Response of server-sent events, with `keep_alive` whenever none was sent for 10 s.

    So also while a message waits for its parser, or has tokens but no text.
    """

    def __init__(
        self,
        events: AsyncGenerator[str, None] | AsyncGenerator[bytes, None],
        keep_alive: bytes = KEEP_ALIVE,
    ) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events = events
        self._keep_alive = keep_alive
        self._sent_at = 0.0

    async def stream_response(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        self._sent_at = clock()

        async def send_timed(message: Message) -> None:
            await send(message)
            self._sent_at = clock()

        timer = asyncio.create_task(self._send_keep_alives(send_timed))
        try:
            await super().stream_response(send_timed)
        finally:
            timer.cancel()
            # At once: the samples of a client that has disconnected end when its stream is closed.
            with CancelScope(shield=True):
                await self._events.aclose()

    async def _send_keep_alives(self, send: Send) -> None:
        """Send keep-alives until cancelled, or until the client has disconnected."""
        clock = asyncio.get_running_loop().time
        with suppress(OSError):
            while True:
                silent = clock() - self._sent_at
                if silent >= KEEP_ALIVE_SECONDS:
                    body = {"type": "http.response.body", "body": self._keep_alive}
                    await send({**body, "more_body": True})
                else:
                    await asyncio.sleep(KEEP_ALIVE_SECONDS - silent)
