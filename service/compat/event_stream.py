"""Server-sent event responses of the other servers' APIs, with keep-alives and errors."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.types import Message, Send

from coppice.wire.packed.results import EndRecord
from coppice.wire.problem_catalogue import Problem
from coppice.wire.rollouts import RolloutAnswer
from service.compat.answer_fields import token_counts, usage
from service.compat.bodies import CompatModel, Flag
from service.compat.openai_errors import as_openai, with_openai_error
from service.compat.request import ROLLOUT_ERRORS
from service.compat.sample_stream import SamplePart, sample_parts
from service.errors import InvalidRequest
from service.http.exception_handlers import to_service_error
from service.http.responses import JSON, declare_responses
from service.rollouts.rollout import Rollout
from service.server import Server

EVENT_STREAM = "text/event-stream"
EVENTS_OR_JSON = declare_responses({200: (*JSON, EVENT_STREAM)}, *ROLLOUT_ERRORS)
STREAM_RESPONSES = as_openai(EVENTS_OR_JSON)
KEEP_ALIVE = b": samples are still being generated\n\n"
KEEP_ALIVE_SECONDS = 10.0
DONE = b"data: [DONE]\n\n"

ToChunks = Callable[[SamplePart], Awaitable[Sequence[dict[str, Any]]]]
"""Builds the chunks (`choices` and top-level fields) of a part of a sample; none if it has none."""


class StreamOptions(CompatModel):
    """Streaming options; as in vLLM, `continuous_usage_stats` requires `include_usage`."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class StreamFields(CompatModel):
    stream: Flag = False
    stream_options: StreamOptions | None = None

    def check_stream(self) -> None:
        if not self.stream and self.stream_options and self.stream_options.model_fields_set:
            raise InvalidRequest.of_parameter("stream_options", "allowed only with stream: true")


def openai_error_event(problem: Problem) -> bytes:
    """Server-sent error event in the format of vLLM's ErrorResponse."""
    error = {**with_openai_error(problem)["error"], "param": None, "code": problem.status}
    return sse_event({"error": error})


def error_event(
    server: Server,
    problem: Problem,
    to_error: Callable[[Problem], bytes] = openai_error_event,
) -> bytes:
    """Server-sent error event; counted in the metrics."""
    server.metrics.http.problems.labels(problem.code).inc()
    return to_error(problem)


def stream_response(
    server: Server,
    rollout: Rollout,
    head: dict[str, Any],
    to_chunks: ToChunks,
    options: StreamOptions | None,
    *,
    to_usage: Callable[[RolloutAnswer], dict[str, Any]] = usage,
) -> Response:
    """Response that streams a rollout as server-sent events; a disconnect cancels the rollout."""
    stream = _Chunks(server, rollout, head, to_chunks, options or StreamOptions(), to_usage)
    return event_response(server, rollout, stream.events())


def event_response(
    server: Server,
    rollout: Rollout,
    events: AsyncIterator[bytes],
    *,
    to_error: Callable[[Problem], bytes] = openai_error_event,
    keep_alive: bytes = KEEP_ALIVE,
    end: bytes = DONE,
) -> Response:
    """Response of encoded server-sent events, with `end` after the last.

    An error is an event as well, since the status is sent before the first event.
    """

    async def guarded() -> AsyncIterator[bytes]:
        try:
            async for event in events:
                yield event
        except Exception as error:
            failed = to_service_error(ExceptionGroup("a stream broke off", [error]))
            yield error_event(server, failed.problem(), to_error)
        finally:
            server.rollouts.on_disconnect(rollout)
        yield end

    return EventStreamResponse(guarded(), keep_alive)


class EventStreamResponse(StreamingResponse):
    """Response of server-sent events, with `keep_alive` whenever none was sent for 10 s.

    So also while a message waits for its parser, or has tokens but no text.
    """

    def __init__(self, events: AsyncIterator[bytes], keep_alive: bytes) -> None:
        super().__init__(events, media_type=EVENT_STREAM)
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


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Server-sent events of one rollout, whose chunks have `head` and the fields of a part."""

    server: Server
    rollout: Rollout
    head: dict[str, Any]
    to_chunks: ToChunks
    options: StreamOptions
    to_usage: Callable[[RolloutAnswer], dict[str, Any]]

    async def events(self) -> AsyncIterator[bytes]:
        async for part in sample_parts(self.rollout):
            match part:
                case SamplePart():
                    for chunk in await self.to_chunks(part):
                        event = {**self.head, **chunk, **self._usage(part)}
                        yield await part.run(partial(sse_event, event))
                case EndRecord(problem=problem) if problem is not None:
                    yield error_event(self.server, problem)
                case EndRecord() if self.options.include_usage:
                    total = self.to_usage(await self.rollout.answer())
                    yield sse_event({**self.head, "choices": [], "usage": total})

    def _usage(self, part: SamplePart) -> dict[str, Any]:
        """Field `usage` of a stream's chunk, if requested; null in chunks without token counts."""
        if not self.options.include_usage:
            return {}
        if not self.options.continuous_usage_stats:
            return {"usage": None}
        prompt = self.rollout.groups[part.group].options.prompt_token_ids
        return {"usage": token_counts(len(prompt), part.end)}


def sse_event(value: object) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"
