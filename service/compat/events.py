"""Server-sent events, in the way of OpenAI's streams."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json

from coppice.wire.records import EndRecord, ProgressRecord, SampleRecord
from coppice.wire.rollouts import SampleAnswer
from service.compat.messages import members
from service.rollout import Rollout
from service.server import Server

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE = b": samples are still being drawn\n\n"
DONE = b"data: [DONE]\n\n"

Choice = Callable[[int, SampleAnswer], Awaitable[dict[str, Any]]]
"""What to write of a sample of the group with this index."""


def streamed(server: Server, rollout: Rollout, head: dict[str, Any], choice: Choice) -> Response:
    """For whoever started the rollout: it ends when they leave."""
    return StreamingResponse(_events(server, rollout, head, choice), media_type=MEDIA_TYPE)


async def _events(
    server: Server, rollout: Rollout, head: dict[str, Any], choice: Choice
) -> AsyncIterator[bytes]:
    """A choice is sent when it has ended: the engine hands out samples, not single tokens."""
    try:
        async for record in rollout.records():
            match record:
                case SampleRecord(group=group, sample=sample):
                    yield _data({**head, "choices": [await choice(group, sample)]})
                case ProgressRecord():
                    yield KEEP_ALIVE
                case EndRecord(problem=problem) if problem is not None:
                    yield _data(members(problem))
        yield DONE
    finally:
        server.rollouts.left(rollout)


def _data(value: object) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def now() -> int:
    """Seconds since 1970, which is what `created` means to these clients."""
    return int(time.time())
