"""Server-sent events, in the way of OpenAI's streams."""

import time

from pydantic_core import to_json

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE = b": samples are still being drawn\n\n"
DONE = b"data: [DONE]\n\n"


def data(value: object) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def now() -> int:
    """Seconds since 1970, which is what `created` means to these clients."""
    return int(time.time())
